#include "runtime/launch.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "runtime/error.h"
#include "runtime/options.h"

namespace {

struct Launcher {
  const char *by, *rank, *ranks, *local_rank;
};

// srun's variables are those of a job step: within a batch script, where one process runs, SLURM_PROCID and
// SLURM_NTASKS are there too.
constexpr Launcher launchers[] = {
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"},
};

bool given(const char* name) {
  const char* text = getenv(name);
  return text && *text;
}

int number(const char* name, int min, int max) {
  const char* text = getenv(name);
  const char* end = text + strlen(text);
  int x = 0;
  const auto [stop, error] = std::from_chars(text, end, x);
  if (error != std::errc() || stop != end || x < min || x > max)
    USAGE_ERROR("%s: found %s in the environment, expected a whole number from %d to %d", name, in_quotes(text).c_str(),
                min, max);
  return x;
}

}  // namespace

Launch detect_launch() {
  Launch launch;
  for (const Launcher& l : launchers) {
    if (!given(l.rank) && !given(l.ranks)) continue;
    if (!strcmp(l.by, "srun") && !given(l.ranks)) continue;
    for (const char* name : {l.rank, l.ranks})
      if (!given(name))
        USAGE_ERROR("%s: not in the environment, but %s is; several ranks need both, a single process none", name,
                    name == l.rank ? l.ranks : l.rank);
    launch.by = l.by;
    launch.ranks = number(l.ranks, 1, 65536);
    launch.rank = number(l.rank, 0, launch.ranks - 1);
    if (given(l.local_rank)) launch.local_rank = number(l.local_rank, 0, launch.ranks - 1);
    break;
  }
  if (launch.ranks == 1) return Launch();
  if (given("MASTER_ADDR") && given("MASTER_PORT")) {
    launch.master_address = getenv("MASTER_ADDR");
    launch.master_port = number("MASTER_PORT", 1, 65535);
  } else if (launch.by == "torchrun") {
    USAGE_ERROR("%s: not in the environment, but WORLD_SIZE = %d; MASTER_ADDR and MASTER_PORT say where rank 0 listens",
                given("MASTER_ADDR") ? "MASTER_PORT" : "MASTER_ADDR", launch.ranks);
  }
  return launch;
}
