// Runs a grid: blocks one after the other, threads of a block as fibers, and the schedules that choose among them.
//
// Threads that never wait share one fiber and run as a plain loop; a thread gets a fiber for itself when it waits.
#include "dev/tests/simt/engine.h"
#include "dev/tests/simt/memory.h"

#include <bit>
#include <mutex>
#include <numeric>

namespace simt {

Engine engine;

namespace {

Engine& e = engine;

int words() { return (e.count + 63) / 64; }

// The first ready thread with number >= from, else the first of all; -1 if none.
int ready_from(int from) {
  const int n = words();
  if (from >= e.count) from = 0;
  uint64_t word = e.ready[from / 64] & (~uint64_t{0} << from % 64);
  for (int i = 0, w = from / 64; i <= n; i++) {
    if (word) return w * 64 + std::countr_zero(word);
    w = w + 1 == n ? 0 : w + 1;
    word = e.ready[w];
  }
  return -1;
}

// The last ready thread with number <= from, else the last of all; -1 if none.
int ready_down_from(int from) {
  const int n = words();
  if (from < 0) from = e.count - 1;
  uint64_t word = e.ready[from / 64] & (~uint64_t{0} >> (63 - from % 64));
  for (int i = 0, w = from / 64; i <= n; i++) {
    if (word) return w * 64 + 63 - std::countl_zero(word);
    w = w == 0 ? n - 1 : w - 1;
    word = e.ready[w];
  }
  return -1;
}

// Who runs after thread number `last`.
Thread* pick(int last) {
  int next = -1;
  switch (options().schedule) {
    case Schedule::forward: next = ready_from(last + 1); break;
    case Schedule::reverse: next = ready_down_from(last - 1); break;
    case Schedule::ahead: next = ready_from(0); break;
    case Schedule::random: next = ready_from(static_cast<int>(next_random() % static_cast<uint64_t>(e.count))); break;
  }
  return next < 0 ? nullptr : &e.threads[next];
}

void take_up(Thread& t) {
  e.current = &t;
  threadIdx = t.index;
  clear_ready(t);
}

void release_barrier() {
  for (int i = 0; i < e.count; i++) {
    Thread& t = e.threads[i];
    if (t.state != State::at_barrier) continue;
    t.state = State::ready;
    set_ready(t);
  }
  for (int w = 0; w < e.warp_count; w++) e.warps[w].at_barrier = 0;
  e.waiting = 0;
  e.counters.block_barriers++;
}

void begin(Thread& t) {
  t.state = State::ready;
  if (under_tsan()) {
    char name[96];
    snprintf(name, sizeof name, "block (%u,%u,%u) thread (%u,%u,%u)", blockIdx.x, blockIdx.y, blockIdx.z, t.index.x,
             t.index.y, t.index.z);
    tsan_name(*t.fiber, name);
    tsan_acquire(&e.started);
    tsan_acquire(&e.lineage->finished[!e.generation]);
  }
}

void end(Thread& t) {
  tsan_release(&e.lineage->finished[e.generation]);
  t.state = State::done;
  t.queue.clear();
  Warp& warp = e.warps[t.warp];
  warp.live &= ~(1u << t.lane);
  e.live--;
  if (warp.arrived)
    fail("lane %d returned while lanes %s of its warp wait for it in a warp collective", t.lane,
         lane_list(warp.arrived).c_str());
  if (e.waiting && e.waiting == e.live) release_barrier();
}

// Every fiber's main: runs the current thread to its end, and further ones as long as those haven't started.
void work() {
  fiber_entered();
  for (;;) {
    Thread& me = *e.current;
    Fiber& fiber = *me.fiber;
    begin(me);
    e.body(e.arguments);
    end(me);
    me.fiber = nullptr;
    Thread* next = pick(me.number);
    if (!next) {
      if (e.live) fail("stuck: no thread of the block can run");
      if (!under_tsan()) fiber.next_free = e.free_fibers, e.free_fibers = &fiber;
      switch_fiber(fiber, e.host, true);
    }
    if (next->state == State::fresh && !under_tsan()) {
      next->fiber = &fiber;
      take_up(*next);
      continue;
    }
    if (!under_tsan()) fiber.next_free = e.free_fibers, e.free_fibers = &fiber;
    if (next->state == State::fresh) prepare_fiber(*next->fiber, work);
    take_up(*next);
    e.counters.switches++;
    switch_fiber(fiber, *next->fiber, true);
  }
}

// A fiber for a thread that starts while others hold theirs.
void equip(Thread& t) {
  static int created = 0;
  if (!t.fiber) {
    if (!e.free_fibers) e.free_fibers = create_fiber(created++);
    t.fiber = e.free_fibers;
    e.free_fibers = t.fiber->next_free;
    t.fiber->next_free = nullptr;
  }
  prepare_fiber(*t.fiber, work);
}

void run_block() {
  open_arena(e.lineage->arena, e.grid.dynamic_bytes);
  e.live = e.count;
  e.waiting = 0;
  for (int w = 0; w < e.warp_count; w++) {
    const int lanes = std::min(32, e.count - 32 * w);
    e.warps[w] = {all_lanes >> (32 - lanes), 0, 0, &e.threads[32 * w]};
  }
  for (int i = 0; i < e.count; i++) {
    Thread& t = e.threads[i];
    t.state = State::fresh;
    t.barriers = t.warp_barriers = 0;
    t.fiber = nullptr;
    if (under_tsan()) {
      Fiber*& own = e.lineage->fibers[i];
      if (!own) own = create_fiber(i);
      t.fiber = own;
    }
    set_ready(t);
  }
  Thread* first = pick(options().schedule == Schedule::reverse ? e.count : -1);
  equip(*first);
  take_up(*first);
  switch_fiber(e.host, *first->fiber);
  e.current = nullptr;
  check_arena(e.lineage->arena);
  e.counters.blocks++;
  e.counters.threads += static_cast<uint64_t>(e.count);
}

void check_launch(const Grid& g) {
  const uint64_t threads = uint64_t{g.threads.x} * g.threads.y * g.threads.z;
  if (threads < 1 || threads > max_threads || g.threads.z > 64)
    fail("blocks of %ux%ux%u threads: 1 to 1024 are possible, at most 64 along z", g.threads.x, g.threads.y,
         g.threads.z);
  if (g.blocks.x < 1 || g.blocks.y < 1 || g.blocks.z < 1 || g.blocks.x > 0x7fffffffu || g.blocks.y > 65535 ||
      g.blocks.z > 65535)
    fail("a grid of %ux%ux%u blocks: at least 1 each way, at most 2^31-1, 65535, 65535", g.blocks.x, g.blocks.y,
         g.blocks.z);
}

}  // namespace

void wait(Thread& me, State state, const char* what, Site site) {
  me.state = state;
  me.what = what;
  me.site = site;
  Thread* next = pick(me.number);
  if (!next) fail("stuck: no thread of the block can run");
  if (next->state == State::fresh) equip(*next);
  take_up(*next);
  e.counters.switches++;
  switch_fiber(*me.fiber, *next->fiber);
}

namespace {

// Whoever completes a barrier or collective either runs on, or waits its turn like the others.
void after_completing(Thread& me) {
  const Schedule s = options().schedule;
  if (s == Schedule::ahead || (s == Schedule::random && next_random() % 2)) {
    me.state = State::ready;
    clear_ready(me);
    return;
  }
  set_ready(me);
  Thread* next = pick(me.number);
  me.state = State::ready;
  if (next == &me) return clear_ready(me);
  if (next->state == State::fresh) equip(*next);
  take_up(*next);
  e.counters.switches++;
  switch_fiber(*me.fiber, *next->fiber);
}

}  // namespace

void block_barrier(Site site) {
  Thread& me = *e.current;
  Warp& warp = e.warps[me.warp];
  me.what = "__syncthreads";
  me.site = site;
  if (warp.arrived)
    fail("stuck: lane %d came to __syncthreads at %s while lanes %s of its warp wait for it in a warp collective",
         me.lane, place(site).c_str(), lane_list(warp.arrived).c_str());
  if (!e.waiting) {
    e.barrier_site = site;
  } else if (!same(site, e.barrier_site)) {
    fail("threads of one block met at different barriers: %s and %s", place(e.barrier_site).c_str(),
         place(site).c_str());
  }
  char* order = &e.lineage->barrier[me.barriers++ % 2];
  tsan_release(order);
  warp.at_barrier |= 1u << me.lane;
  e.waiting++;
  if (e.waiting == e.live) {
    release_barrier();
    after_completing(me);
  } else {
    wait(me, State::at_barrier, "__syncthreads", site);
  }
  tsan_acquire(order);
}

void warp_collective(Collective& call) {
  Thread& me = *e.current;
  Warp& warp = e.warps[me.warp];
  me.what = call.name;
  me.site = call.site;
  me.call = &call;
  if (warp.arrived) {
    const Thread& first = warp.lanes[std::countr_zero(warp.arrived)];
    if (first.call->op != call.op || !same(first.call->site, call.site))
      fail("lanes of one warp met in different collectives: lanes %s in %s at %s, lane %d in %s at %s",
           lane_list(warp.arrived).c_str(), first.call->name, place(first.call->site).c_str(), me.lane, call.name,
           place(call.site).c_str());
  }
  if (call.mask != warp.live)
    fail("%s at %s: mask %08x, but the lanes alive in this warp are %08x", call.name, place(call.site).c_str(),
         call.mask, warp.live);
  if (warp.at_barrier)
    fail("stuck: lane %d waits in %s at %s for lanes %s of its warp, which wait at __syncthreads at %s", me.lane,
         call.name, place(call.site).c_str(), lane_list(warp.at_barrier).c_str(), place(e.barrier_site).c_str());
  char* order = nullptr;
  if (call.op == Op::sync) {
    order = &e.lineage->warp_barrier[me.warp][me.warp_barriers++ % 2];
    tsan_release(order);
  }
  warp.arrived |= 1u << me.lane;
  if (warp.arrived == warp.live) {
    perform(warp);
    for (unsigned lanes = warp.arrived; lanes; lanes &= lanes - 1) {
      Thread& t = warp.lanes[std::countr_zero(lanes)];
      t.state = State::ready;
      set_ready(t);
    }
    warp.arrived = 0;
    e.counters.collectives++;
    after_completing(me);
  } else {
    wait(me, State::in_collective, call.name, call.site);
  }
  if (order) tsan_acquire(order);
}

void run_grid(const Grid& grid, void (*thread)(void*), void* arguments) {
  if (e.current) fail("a launch inside a kernel");
  static std::mutex one_launch_at_a_time;
  const std::lock_guard lock(one_launch_at_a_time);
  e.launching = true;
  e.grid = grid;
  check_launch(grid);
  e.body = thread;
  e.arguments = arguments;
  e.random = options().seed * 0x9e3779b97f4a7c15u + 1;
  blockDim = grid.threads;
  gridDim = grid.blocks;
  e.count = static_cast<int>(grid.threads.x * grid.threads.y * grid.threads.z);
  e.warp_count = (e.count + 31) / 32;
  for (int i = 0; i < e.count; i++) {
    Thread& t = e.threads[i];
    const unsigned n = static_cast<unsigned>(i);
    t.index = {n % grid.threads.x, n / grid.threads.x % grid.threads.y, n / grid.threads.x / grid.threads.y};
    t.number = i;
    t.warp = static_cast<short>(i / 32);
    t.lane = static_cast<short>(i % 32);
  }
  watch_faults();
  adopt_host(e.host);
  tsan_release(&e.started);

  const uint64_t blocks = uint64_t{grid.blocks.x} * grid.blocks.y * grid.blocks.z;
  // A walk with a stride coprime to the count visits every block once, without a table.
  uint64_t stride = 1, first = 0;
  if (options().schedule == Schedule::random) {
    first = next_random() % blocks;
    stride = next_random() % blocks + 1;
    while (std::gcd(stride, blocks) != 1) stride++;
  }
  for (uint64_t k = 0; k < blocks; k++) {
    uint64_t b = options().schedule == Schedule::reverse ? blocks - 1 - k : (first + k * stride) % blocks;
    blockIdx.x = static_cast<unsigned>(b % grid.blocks.x);
    b /= grid.blocks.x;
    blockIdx.y = static_cast<unsigned>(b % grid.blocks.y);
    blockIdx.z = static_cast<unsigned>(b / grid.blocks.y);
    e.lineage = &e.lineages[under_tsan() ? k % 2 : 0];
    e.generation = static_cast<int>(k / 2 % 2);
    run_block();
  }
  for (Lineage& lineage : e.lineages)
    for (char& finished : lineage.finished) tsan_acquire(&finished);
  e.launching = false;
}

Counters& counters() { return e.counters; }

}  // namespace simt
