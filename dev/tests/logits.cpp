// The logits of a model file, for transformers_test.py.
//
//   logits PATH fp32|bf16 ID...      writes (T, V) floats, those that follow each of the T ids
#define TRAIN_GPT_NO_MAIN
#include "train_gpt.cu"

template <class floatX>
void write_logits(const ModelFile& file, const std::vector<int>& tokens) {
  ModelConfig config;
  config.L = file.L, config.NH = file.NH, config.C = file.C, config.max_T = file.max_T, config.V = file.V;
  config.Vp = (config.V + 127) / 128 * 128;
  const int T = static_cast<int>(tokens.size());
  Device device(DeviceKind::cpu, 0, 1);
  GPT<floatX> model(config, 1, T, Recompute::none, std::nullopt, device);
  load_weights(model.params(), file, model.table.parameters, device);
  model.forward(tokens.data(), 1, T);
  for (int t = 0; t < T; t++) {
    for (const floatX logit : model.logits(t)) {
      const float x = to_float(logit);
      fwrite(&x, sizeof(x), 1, stdout);
    }
  }
}

int main(int argc, char** argv) {
  CHECK(argc > 3, "usage: logits PATH fp32|bf16 ID...");
  std::vector<int> tokens;
  for (int i = 3; i < argc; i++) tokens.push_back(std::stoi(argv[i]));
  const ModelFile file(argv[1], "logits");
  if (std::string(argv[2]) == "fp32")
    write_logits<float>(file, tokens);
  else
    write_logits<bf16>(file, tokens);
}
