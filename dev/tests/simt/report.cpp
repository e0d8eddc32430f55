// Options from the environment, the list and the dropping of barriers for mutation tests, and reports of failure.
//
//   SIMT_SITES=file   every barrier place (__syncthreads, __syncwarp, cp_async_wait) is appended to the file when first
//                     reached: kind, a blank, path:line:column
//   SIMT_DROP=place   the barrier there is skipped; path:line or path:line:column, where the end of a path is enough
#include <cstdlib>
#include <vector>

#include "dev/tests/simt/engine.h"

namespace simt {
namespace {

[[noreturn]] void bad_setting(const char* name, const char* value, const char* expected) {
  fprintf(stderr, "simt: %s=%s: expected %s\n", name, value, expected);
  exit(2);
}

Options from_environment() {
  Options o;
  if (const char* s = getenv("SIMT_SCHEDULE")) {
    const std::string name = s;
    if (name == "forward") o.schedule = Schedule::forward;
    else if (name == "reverse") o.schedule = Schedule::reverse;
    else if (name == "random") o.schedule = Schedule::random;
    else if (name == "ahead") o.schedule = Schedule::ahead;
    else bad_setting("SIMT_SCHEDULE", s, "forward, reverse, random or ahead");
  }
  if (const char* s = getenv("SIMT_ASYNC")) {
    const std::string name = s;
    if (name == "issue") o.async = Async::at_issue;
    else if (name == "wait") o.async = Async::at_wait;
    else if (name == "random") o.async = Async::random;
    else bad_setting("SIMT_ASYNC", s, "issue, wait or random");
  }
  if (const char* s = getenv("SIMT_STREAMS")) {
    const std::string name = s;
    if (name == "eager") o.streams = Streams::eager;
    else if (name == "lazy") o.streams = Streams::lazy;
    else if (name == "racing") o.streams = Streams::racing;
    else bad_setting("SIMT_STREAMS", s, "eager, lazy or racing");
  }
  const auto number = [](const char* name, const char* s) {
    char* end;
    const unsigned long long n = strtoull(s, &end, 0);
    if (*s == '\0' || *end != '\0') bad_setting(name, s, "a whole number");
    return n;
  };
  if (const char* s = getenv("SIMT_SEED")) o.seed = number("SIMT_SEED", s);
  if (const char* s = getenv("SIMT_POISON")) o.poison = static_cast<uint32_t>(number("SIMT_POISON", s));
  return o;
}

struct Tracking {
  const char* drop = getenv("SIMT_DROP");
  const char* list = getenv("SIMT_SITES");
  std::vector<Site> seen;
};
Tracking tracking;

bool ends_with(const std::string& s, const char* end) {
  const size_t n = strlen(end);
  return s.size() >= n && s.compare(s.size() - n, n, end) == 0;
}

void note(const Site& site, const char* kind) {
  for (const Site& s : tracking.seen)
    if (same(s, site)) return;
  tracking.seen.push_back(site);
  if (FILE* f = fopen(tracking.list, "a")) {
    fprintf(f, "%s %s:%u\n", kind, place(site).c_str(), site.column());
    fclose(f);
  }
}

}  // namespace

Options& options() {
  static Options o = from_environment();
  return o;
}

std::string describe(const Options& o) {
  static const char* const schedules[] = {"forward", "reverse", "random", "ahead"};
  static const char* const asyncs[] = {"issue", "wait", "random"};
  static const char* const streams[] = {"eager", "lazy", "racing"};
  return strf("SIMT_SCHEDULE=%s SIMT_SEED=%llu SIMT_ASYNC=%s SIMT_POISON=%#x SIMT_STREAMS=%s",
              schedules[static_cast<int>(o.schedule)],
              static_cast<unsigned long long>(o.seed), asyncs[static_cast<int>(o.async)], o.poison,
              streams[static_cast<int>(o.streams)]);
}

bool dropped(Site site, const char* kind) {
  if (!tracking.list && !tracking.drop) return false;
  if (tracking.list) note(site, kind);
  if (!tracking.drop) return false;
  const std::string line = place(site);
  return ends_with(line, tracking.drop) || ends_with(line + ":" + std::to_string(site.column()), tracking.drop);
}

std::string place(const Site& site) { return std::string(site.file_name()) + ":" + std::to_string(site.line()); }

std::string lane_list(unsigned lanes) {
  std::string text;
  for (int i = 0; i < 32; i++) {
    if (!(lanes >> i & 1)) continue;
    int last = i;
    while (last < 31 && (lanes >> (last + 1) & 1)) last++;
    text += (text.empty() ? "" : ",") + std::to_string(i) + (last > i ? "-" + std::to_string(last) : "");
    i = last;
  }
  return text;
}

namespace {

std::string whereabouts(const Thread& t) {
  if (&t == engine.current) return "running here";
  switch (t.state) {
    case State::fresh: return "not started";
    case State::ready: return "could run";
    case State::done: return "returned";
    default: return std::string("wait in ") + t.what + " at " + place(t.site);
  }
}

// One line for each group of lanes that are in the same place.
void print_warps() {
  const Engine& e = engine;
  for (int w = 0; w < e.warp_count; w++) {
    unsigned left = 0;
    for (int i = 32 * w; i < e.count && i < 32 * w + 32; i++) left |= 1u << i % 32;
    while (left) {
      std::string text;
      unsigned lanes = 0;
      for (int lane = 0; lane < 32; lane++) {
        if (!(left >> lane & 1)) continue;
        const std::string here = whereabouts(e.threads[32 * w + lane]);
        if (text.empty()) text = here;
        if (text == here) lanes |= 1u << lane;
      }
      fprintf(stderr, "  warp %d, lanes %s: %s\n", w, lane_list(lanes).c_str(), text.c_str());
      left &= ~lanes;
    }
  }
}

}  // namespace

void fail(const char* format, ...) {
  fflush(stdout);
  fprintf(stderr, "simt: ");
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fprintf(stderr, "\n");
  if (engine.launching) {
    fprintf(stderr, "  in launch(%s) at %s:%d, %s\n", engine.grid.text, engine.grid.file, engine.grid.line,
            describe(options()).c_str());
    fprintf(stderr, "  block (%u,%u,%u)", blockIdx.x, blockIdx.y, blockIdx.z);
    if (engine.current) {
      const uint3 t = engine.current->index;
      fprintf(stderr, ", thread (%u,%u,%u) = warp %d lane %d\n", t.x, t.y, t.z, engine.current->warp,
              engine.current->lane);
      print_warps();
    } else {
      fprintf(stderr, ", not running\n");
    }
  }
  abort();
}

}  // namespace simt
