// What a device provides, for a host compiler: the same kernels/*.cu become a shared library whose blocks run on OS
// threads and whose CUDA threads are fibers of those. Meant for tests of kernels where there is no GPU.
//
// Where this is stricter than a device: shared memory, static and dynamic, holds 0xFF at a block's start; a cp.async
// destination holds 0xFF until the thread waits for its group; every other block runs its threads in descending order,
// so that a missing barrier shows; threads that wait for each other for ever end the launch with a sentence, and so do
// an address that nobody has mapped and arguments that are not the kernel's. Where it is weaker: other addresses out of
// bounds are not seen (guard bands are the caller's), a loop that polls memory ends only if it calls __nanosleep, and a
// thread runs from one barrier or collective to the next without others in between.
#ifndef LIB_EMULATE
#define LIB_EMULATE
#if !defined(__x86_64__) || !defined(__linux__)
#error "emulation switches stacks by hand: it is written for x86-64 Linux"
#endif

#include <dlfcn.h>
#include <link.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <type_traits>
#include <utility>

#define EMULATED static inline __attribute__((always_inline))

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Saves the callee-saved registers and the stack pointer in *save, continues where `load` was saved.
extern "C" __attribute__((visibility("hidden"))) void emulate_switch(void** save, void* load);
asm(R"(
  .text
  .hidden emulate_switch
  .globl emulate_switch
  .type emulate_switch, @function
emulate_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emulate_switch, .-emulate_switch
)");

namespace emulate {

constexpr unsigned EVERY_LANE = 0xFFFFFFFFu;
constexpr unsigned MAX_THREADS = 1024;
// A fiber's slot of address space: a guard page, its pending copies, its stack, its Fiber at the top. A power of two,
// so that the Fiber is found from the stack pointer alone.
constexpr uintptr_t SLOT = 1 << 17;
constexpr uintptr_t PAGE = 4096;
constexpr unsigned GUARD = 256;  // bytes around dynamic shared memory that must not change
constexpr int64_t SPIN_LIMIT_S = 30;

struct Warp;
struct Block;

// What a warp's lanes do together. `complete` runs once, in the last lane that arrives, for the lanes of `who`.
struct Collective {
  const char* name;
  void (*complete)(Warp&, unsigned who);
};

struct Copy {
  void* to;
  const void* from;
  unsigned bytes, group;
};

struct alignas(128) Fiber {
  void* stack;
  Warp* warp;
  Block* block;
  uint3 thread;
  unsigned lane;
  unsigned group, copies_from, copies_to;  // open cp.async group; pending copies
};

struct alignas(64) Warp {
  Block* block;
  unsigned index;
  unsigned live;      // lanes that have not returned
  unsigned runnable;  // lanes that do not wait; the running one among them
  unsigned waiting;   // lanes in a collective
  unsigned mask[32];
  const Collective* op[32];
  uint64_t in[32];
  uint64_t out[32];
  unsigned from[32];
};

struct Barrier {
  unsigned arrived, expected;
  int votes, result;
  unsigned waiting[32];
};

struct Launch {
  void (*call)(void**);
  void** args;
  dim3 grid;
  unsigned threads, shared_bytes;
  uint64_t blocks, next;
  char* error;
  unsigned error_len;
  int failed;
  pthread_mutex_t lock;
};

struct Block {
  Launch* launch;
  uint3 index;
  dim3 threads, grid;
  unsigned warps, live;
  bool descending;
  unsigned char* shared;
  void* worker;  // the stack of hw_launch's thread
  uintptr_t slots;
  uint64_t sleeps;
  int64_t asleep_since;
  Barrier barrier[16];
  Warp warp[32];
};

// Fibers lie at different offsets of their slots: at equal ones they would all share a few sets of every cache.
EMULATED Fiber* fiber_of(uintptr_t slot) {
  return reinterpret_cast<Fiber*>((slot + 1) * SLOT - ((slot * 13) & 127) * 128 - sizeof(Fiber));
}
EMULATED Fiber* self() { return fiber_of(reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) / SLOT); }
EMULATED Fiber* fiber_at(const Warp& w, unsigned lane) { return fiber_of(w.block->slots + w.index * 32 + lane); }
EMULATED uintptr_t slot_of(const Fiber* f) { return reinterpret_cast<uintptr_t>(f) / SLOT; }

// --- failures -------------------------------------------------------------------------------------------------------

// Ends the launch because of what `f` did: the first sentence is kept, its block's fibers are abandoned where they are.
[[noreturn]] __attribute__((noinline, cold)) static void fail_at(Fiber* f, const char* format, ...) {
  Block& b = *f->block;
  Launch& launch = *b.launch;
  pthread_mutex_lock(&launch.lock);
  if (!launch.failed && launch.error_len > 0) {
    Dl_info info;
    bool known = dladdr(reinterpret_cast<void*>(launch.call), &info) && info.dli_sname;
    const char* name = known ? info.dli_sname : "?";
    int length = int(strlen(name));
    if (length > 5 && !strcmp(name + length - 5, "_call")) length -= 5;
    int used = snprintf(launch.error, launch.error_len, "kernel %.*s, block (%u, %u, %u), thread %u: ", length, name,
                        b.index.x, b.index.y, b.index.z, f->thread.x);
    va_list list;
    va_start(list, format);
    if (used > 0 && unsigned(used) < launch.error_len)
      vsnprintf(launch.error + used, launch.error_len - used, format, list);
    va_end(list);
  }
  __atomic_store_n(&launch.failed, 1, __ATOMIC_RELAXED);
  pthread_mutex_unlock(&launch.lock);
  emulate_switch(&f->stack, b.worker);
  __builtin_unreachable();
}

template <class... A>
[[noreturn]] EMULATED void fail(const char* format, A... values) {
  fail_at(self(), format, values...);
}

[[noreturn]] __attribute__((noinline, cold)) static void fail_deadlock(Block& b) {
  char text[512];
  int used = 0;
  auto add = [&](const char* format, auto... values) {
    int n = snprintf(text + used, sizeof(text) - used, format, values...);
    used = n < 0 || used + n >= int(sizeof(text)) ? int(sizeof(text)) - 1 : used + n;
  };
  for (int id = 0; id < 16; id++) {
    unsigned threads = 0;
    for (unsigned w = 0; w < b.warps; w++) threads += __builtin_popcount(b.barrier[id].waiting[w]);
    if (threads && id == 0) add("; %u wait at __syncthreads", threads);
    if (threads && id != 0) add("; %u wait at barrier %d for %u", threads, id, b.barrier[id].expected);
  }
  for (unsigned w = 0; w < b.warps; w++) {
    for (unsigned left = b.warp[w].waiting; left;) {
      unsigned first = __builtin_ctz(left), mask = b.warp[w].mask[first], same = 0;
      const Collective* op = b.warp[w].op[first];
      for (unsigned lane = first; lane < 32; lane++)
        same |= unsigned((left >> lane & 1) && b.warp[w].op[lane] == op && b.warp[w].mask[lane] == mask) << lane;
      add("; lanes 0x%08x of warp %u wait at %s with mask 0x%08x", same, w, op->name, mask);
      left &= ~same;
    }
  }
  fail("deadlock: of %u threads %u have returned%s", b.threads.x, b.threads.x - b.live, text);
}

// --- switching ------------------------------------------------------------------------------------------------------

EMULATED unsigned pick(unsigned lanes, bool descending) {
  return descending ? 31 - __builtin_clz(lanes) : __builtin_ctz(lanes);
}

// The next runnable lane after `f`: later lanes of its warp, then (if `same_warp`) earlier ones, then other warps.
static inline Fiber* next_of(Fiber* f, bool same_warp) {
  Warp& w = *f->warp;
  Block& b = *f->block;
  bool down = b.descending;
  unsigned later = w.runnable & (down ? (1u << f->lane) - 1 : ~((2u << f->lane) - 1));
  if (later) return fiber_at(w, pick(later, down));
  if (same_warp && w.runnable) return fiber_at(w, pick(w.runnable, down));
  for (unsigned i = 1, at = w.index; i <= b.warps; i++) {
    at = down ? (at == 0 ? b.warps : at) - 1 : (at + 1 == b.warps ? 0 : at + 1);
    if (b.warp[at].runnable) return fiber_at(b.warp[at], pick(b.warp[at].runnable, down));
  }
  return nullptr;
}

// Runs others until someone makes `f` runnable again.
__attribute__((noinline)) static void wait(Fiber* f) {
  f->warp->runnable &= ~(1u << f->lane);
  Fiber* next = next_of(f, true);
  if (!next) fail_deadlock(*f->block);
  emulate_switch(&f->stack, next->stack);
}

// Lets every other runnable thread of the block go first.
__attribute__((noinline)) static void give_way(Fiber* f) {
  Block& b = *f->block;
  if ((++b.sleeps & 1023) == 0) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (b.asleep_since == 0) b.asleep_since = now.tv_sec;
    if (now.tv_sec - b.asleep_since > SPIN_LIMIT_S)
      fail("a loop with __nanosleep has polled for %d s", int(SPIN_LIMIT_S));
    if (__atomic_load_n(&b.launch->failed, __ATOMIC_RELAXED)) fail("another block has failed");
    sched_yield();
  }
  Fiber* next = next_of(f, false);
  if (next && next != f) emulate_switch(&f->stack, next->stack);
}

static inline void release(Block& b, Barrier& bar) {
  bar.result = bar.votes;
  bar.votes = 0;
  bar.arrived = 0;
  for (unsigned w = 0; w < b.warps; w++) {
    b.warp[w].runnable |= bar.waiting[w];
    bar.waiting[w] = 0;
  }
}

// Barrier `id` for `threads` threads; 0 for all that have not returned. Returns how many voted.
static inline int barrier(unsigned id, unsigned threads, bool vote, bool stay = true) {
  Fiber* f = self();
  Block& b = *f->block;
  if (id >= 16) fail("barrier %u: there are 16", id);
  Barrier& bar = b.barrier[id];
  if (bar.arrived == 0) bar.expected = threads;
  if (bar.expected != threads) fail("barrier %u is for %u threads, and for %u", id, bar.expected, threads);
  bar.votes += vote;
  bar.arrived++;
  if (stay) bar.waiting[f->warp->index] |= 1u << f->lane;
  if (bar.arrived == (threads == 0 ? b.live : threads)) {
    release(b, bar);
  } else if (stay) {
    wait(f);
  }
  return bar.result;
}

// Whether all lanes of `mask` that have not returned wait for the same thing.
EMULATED bool complete_now(Warp& w, unsigned mask, const Collective* op) {
  unsigned need = mask & w.live;
  if ((w.waiting & need) != need) return false;
  bool same = true;
  for (unsigned left = need; left; left &= left - 1) {
    unsigned lane = __builtin_ctz(left);
    same &= w.mask[lane] == mask && w.op[lane] == op;
  }
  if (!same) return false;
  op->complete(w, need);
  w.waiting &= ~need;
  w.runnable |= need;
  return true;
}

EMULATED void meet(Fiber* f, const Collective* op, unsigned mask) {
  Warp& w = *f->warp;
  unsigned bit = 1u << f->lane;
  if (!(mask & bit)) fail("%s with mask 0x%08x, which leaves out lane %u that calls it", op->name, mask, f->lane);
  w.mask[f->lane] = mask;
  w.op[f->lane] = op;
  w.waiting |= bit;
  if (!complete_now(w, mask, op)) wait(f);
}

// Where a fiber begins; it never returns.
[[noreturn]] static void fiber_main() {
  Fiber* f = self();
  Block& b = *f->block;
  b.launch->call(b.launch->args);
  Warp& w = *f->warp;
  unsigned bit = 1u << f->lane;
  w.live &= ~bit;
  w.runnable &= ~bit;
  b.live--;
  Barrier& all = b.barrier[0];
  if (all.arrived > 0 && all.expected == 0 && all.arrived == b.live) release(b, all);
  for (unsigned left = w.waiting; left;) {
    unsigned lane = __builtin_ctz(left);
    left &= ~w.mask[lane] & (left - 1);
    complete_now(w, w.mask[lane], w.op[lane]);
  }
  void* to = b.worker;
  if (b.live > 0) {
    Fiber* next = next_of(f, true);
    if (!next) fail_deadlock(b);
    to = next->stack;
  }
  emulate_switch(&f->stack, to);
  __builtin_unreachable();
}

// --- collectives ----------------------------------------------------------------------------------------------------

static void do_nothing(Warp&, unsigned) {}
static void do_shuffle(Warp& w, unsigned who) {
  if (who == EVERY_LANE) {
    for (int lane = 0; lane < 32; lane++) w.out[lane] = w.in[w.from[lane]];
    return;
  }
  // A lane that takes no part has no value to give.
  for (int lane = 0; lane < 32; lane++)
    if (who >> lane & 1) w.out[lane] = (who >> w.from[lane] & 1) ? w.in[w.from[lane]] : ~0ull;
}
static void do_ballot(Warp& w, unsigned who) {
  unsigned votes = 0;
  for (int lane = 0; lane < 32; lane++) votes |= unsigned((who >> lane & 1) && w.in[lane]) << lane;
  for (int lane = 0; lane < 32; lane++)
    if (who >> lane & 1) w.out[lane] = uint64_t(who) << 32 | votes;
}
static void do_match(Warp& w, unsigned who) {
  for (int lane = 0; lane < 32; lane++) {
    if (!(who >> lane & 1)) continue;
    unsigned same = 0;
    for (int other = 0; other < 32; other++) same |= unsigned((who >> other & 1) && w.in[other] == w.in[lane]) << other;
    w.out[lane] = uint64_t(who) << 32 | same;
  }
}
template <class T, class F>
static void do_reduce(Warp& w, unsigned who) {
  T sum = 0;
  bool first = true;
  for (int lane = 0; lane < 32; lane++) {
    if (!(who >> lane & 1)) continue;
    sum = first ? T(w.in[lane]) : F::of(sum, T(w.in[lane]));
    first = false;
  }
  for (int lane = 0; lane < 32; lane++)
    if (who >> lane & 1) w.out[lane] = uint64_t(sum);
}
static const Collective SYNCWARP{"__syncwarp", do_nothing}, SHUFFLE{"__shfl_sync", do_shuffle},
    BALLOT{"a vote", do_ballot}, MATCH{"__match_any_sync", do_match};

EMULATED uint64_t together(const Collective* op, unsigned mask, uint64_t value, unsigned from = 0) {
  Fiber* f = self();
  Warp& w = *f->warp;
  w.in[f->lane] = value;
  w.from[f->lane] = from;
  meet(f, op, mask);
  return w.out[f->lane];
}

template <class T>
EMULATED T shuffle(unsigned mask, T value, unsigned from) {
  static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = together(&SHUFFLE, mask, bits, from & 31);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

// --- shared memory --------------------------------------------------------------------------------------------------

EMULATED unsigned char* dynamic_shared() { return self()->block->shared; }

// The place relative to dynamic shared memory, which is at 0: equal to a device's modulo 1024.
EMULATED uint32_t shared_address(const void* p) {
  return uint32_t(static_cast<const unsigned char*>(p) - self()->block->shared);
}

constexpr unsigned MAX_COPIES = 256;
EMULATED Copy* copies_of(const Fiber* f) { return reinterpret_cast<Copy*>(slot_of(f) * SLOT + PAGE); }

static inline void finish_copy(Fiber* f) {
  const Copy& copy = copies_of(f)[f->copies_from++ % MAX_COPIES];
  memset(copy.to, 0, 16);
  memcpy(copy.to, copy.from, copy.bytes);
}

// cp.async: `bytes` of 16 from global memory and zeros, in the open group. The data is there once that is waited for.
static inline void copy16(void* to, const void* from, int bytes) {
  Fiber* f = self();
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16)
    fail("cp.async of 16 bytes from %p to %p: both must be multiples of 16", from, to);
  if (bytes < 0 || bytes > 16) fail("cp.async of %d bytes: 0 to 16 can be read", bytes);
  if (f->copies_to - f->copies_from == MAX_COPIES) finish_copy(f);
  copies_of(f)[f->copies_to++ % MAX_COPIES] = Copy{to, from, unsigned(bytes), f->group};
  memset(to, 0xFF, 16);
}
EMULATED void copy_commit() { self()->group++; }
static inline void copy_wait(unsigned pending) {
  Fiber* f = self();
  while (f->copies_from != f->copies_to && copies_of(f)[f->copies_from % MAX_COPIES].group + pending < f->group)
    finish_copy(f);
}

EMULATED void bar_sync(int id, int threads) { barrier(unsigned(id), unsigned(threads), false); }
EMULATED void bar_arrive(int id, int threads) { barrier(unsigned(id), unsigned(threads), false, false); }

// --- launching ------------------------------------------------------------------------------------------------------

template <class... A, size_t... I>
EMULATED void call_at(void (*f)(A...), void** args, std::index_sequence<I...>) {
  f(*reinterpret_cast<std::remove_cv_t<A>*>(args[I])...);
}
// Calls f with each argument read from the eight bytes at args[i] as f's own type of it; after the last comes a null.
template <class... A>
EMULATED void call(void (*f)(A...), void** args) {
  if (self()->thread.x == 0) {
    constexpr unsigned TAKES = sizeof...(A), SIZES[TAKES + 1] = {sizeof(A)...};
    unsigned given = 0;
    for (; args[given]; given++) {
      uint64_t slot;
      memcpy(&slot, args[given], 8);
      if (given < TAKES && SIZES[given] < 8 && slot >> 8 * SIZES[given])
        fail("argument %u has %u bytes, given is 0x%lx", given, SIZES[given], slot);
    }
    if (given != TAKES) fail("%u arguments for a kernel that takes %u", given, TAKES);
  }
  call_at(f, args, std::index_sequence_for<A...>{});
}

// The stacks of one worker. Kept and handed on: their pages are taken once.
struct Stacks {
  Stacks *next, *next_made;
  uintptr_t first;  // slot
  unsigned guarded;
};
static pthread_mutex_t stacks_lock = PTHREAD_MUTEX_INITIALIZER;
static Stacks *stacks_free = nullptr, *stacks_made = nullptr;

static Stacks* take_stacks(unsigned threads) {
  pthread_mutex_lock(&stacks_lock);
  Stacks* s = stacks_free;
  if (s) stacks_free = s->next;
  pthread_mutex_unlock(&stacks_lock);
  if (!s) {
    size_t bytes = (MAX_THREADS + 1) * SLOT;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    madvise(p, bytes, MADV_NOHUGEPAGE);
    s = new Stacks{nullptr, nullptr, (reinterpret_cast<uintptr_t>(p) + SLOT - 1) / SLOT, 0};
    pthread_mutex_lock(&stacks_lock);
    s->next_made = stacks_made;
    __atomic_store_n(&stacks_made, s, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&stacks_lock);
  }
  for (; s->guarded < threads; s->guarded++)
    mprotect(reinterpret_cast<void*>((s->first + s->guarded) * SLOT), PAGE, PROT_NONE);
  return s;
}
static void give_stacks(Stacks* s) {
  pthread_mutex_lock(&stacks_lock);
  s->next = stacks_free;
  stacks_free = s;
  pthread_mutex_unlock(&stacks_lock);
}

// Bad addresses of fibers end their launch; those of anything else go to whoever handled them before.
constexpr int FAULTS[3] = {SIGSEGV, SIGBUS, SIGFPE};
static struct sigaction handled_before[3];
static void on_fault(int number, siginfo_t* info, void* context) {
  uintptr_t slot = uintptr_t(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RSP]) / SLOT;
  for (Stacks* s = __atomic_load_n(&stacks_made, __ATOMIC_ACQUIRE); s; s = s->next_made) {
    if (slot < s->first || slot >= s->first + s->guarded) continue;
    Fiber* f = fiber_of(slot);
    uintptr_t at = reinterpret_cast<uintptr_t>(info->si_addr);
    if (number == SIGFPE) fail_at(f, "an integer division by zero");
    if (at / SLOT == slot && at % SLOT < PAGE) fail_at(f, "its %lu bytes of stack are used up", SLOT - PAGE);
    // The processor does not tell the address of a misaligned vector.
    if (number == SIGSEGV && info->si_code == SI_KERNEL)
      fail_at(f, "a misaligned access of 16 bytes or more, or a wild address");
    fail_at(f, "nothing is mapped at the address %p it uses", info->si_addr);
  }
  for (int i = 0; i < 3; i++)
    if (FAULTS[i] == number) sigaction(number, &handled_before[i], nullptr);
}
static void handle_faults() {
  for (int i = 0; i < 3; i++) {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    // Not deferred: the handler is left by switching stacks, and never returns to where it could be allowed again.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(FAULTS[i], &action, &handled_before[i]);
  }
}

// This thread's instance of the thread-local variables (static __shared__) of the library that holds `code`.
struct Static {
  const void* code;
  void* at;
  size_t bytes;
};
extern "C" void* __tls_get_addr(size_t*);
static int find_static(dl_phdr_info* info, size_t, void* out) {
  Static* found = static_cast<Static*>(out);
  size_t tls = 0;
  bool mine = false;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& segment = info->dlpi_phdr[i];
    uintptr_t begin = info->dlpi_addr + segment.p_vaddr, code = reinterpret_cast<uintptr_t>(found->code);
    if (segment.p_type == PT_LOAD) mine |= code >= begin && code < begin + segment.p_memsz;
    if (segment.p_type == PT_TLS) tls = segment.p_memsz;
  }
  if (!mine) return 0;
  if (tls > 0) {
    size_t index[2] = {info->dlpi_tls_modid, 0};
    found->at = __tls_get_addr(index);
    found->bytes = tls;
  }
  return 1;
}

static void start_block(Block& b, uint64_t number, Stacks* stacks) {
  const Launch& launch = *b.launch;
  b.index = uint3{unsigned(number % launch.grid.x), unsigned(number / launch.grid.x % launch.grid.y),
                  unsigned(number / launch.grid.x / launch.grid.y)};
  b.descending = number % 2 == 1;
  b.live = launch.threads;
  b.slots = stacks->first;
  b.sleeps = 0;
  b.asleep_since = 0;
  memset(b.barrier, 0, sizeof(b.barrier));
  for (unsigned i = 0; i < b.warps; i++) {
    Warp& w = b.warp[i];
    unsigned lanes = launch.threads - i * 32;
    w.block = &b;
    w.index = i;
    w.live = w.runnable = lanes >= 32 ? EVERY_LANE : (1u << lanes) - 1;
    w.waiting = 0;
  }
  for (unsigned i = 0; i < launch.threads; i++) {
    Fiber* f = fiber_of(b.slots + i);
    // As emulate_switch leaves a stack: six registers, the address to go on at, and the alignment a call gives.
    void** top = reinterpret_cast<void**>(f) - 8;
    memset(top, 0, 8 * sizeof(void*));
    top[6] = reinterpret_cast<void*>(fiber_main);
    *f = Fiber{top, &b.warp[i / 32], &b, uint3{i, 0, 0}, i % 32, 0, 0, 0};
  }
}

// Runs blocks until there are no more. Gives null if it could run none.
static void* work(void* p) {
  Launch& launch = *static_cast<Launch*>(p);
  // A fault handler needs a stack of its own to tell that a fiber's is used up.
  stack_t signals{}, before{};
  sigaltstack(nullptr, &before);
  if (before.ss_flags & SS_DISABLE) {
    signals.ss_size = 1 << 16;
    signals.ss_sp = new char[signals.ss_size];
    sigaltstack(&signals, nullptr);
  }
  Stacks* stacks = take_stacks(launch.threads);
  Block* b = new Block;
  unsigned char* memory = new unsigned char[launch.shared_bytes + 2 * GUARD + 1024];
  uintptr_t aligned = (reinterpret_cast<uintptr_t>(memory) + GUARD + 1023) / 1024 * 1024;
  b->launch = &launch;
  b->threads = dim3(launch.threads);
  b->grid = launch.grid;
  b->warps = (launch.threads + 31) / 32;
  b->shared = reinterpret_cast<unsigned char*>(aligned);
  memset(b->shared - GUARD, 0xA5, GUARD);
  memset(b->shared + launch.shared_bytes, 0xA5, GUARD);
  Static statics{reinterpret_cast<const void*>(launch.call), nullptr, 0};
  dl_iterate_phdr(find_static, &statics);
  while (stacks && !__atomic_load_n(&launch.failed, __ATOMIC_RELAXED)) {
    uint64_t number = __atomic_fetch_add(&launch.next, 1, __ATOMIC_RELAXED);
    if (number >= launch.blocks) break;
    start_block(*b, number, stacks);
    memset(b->shared, 0xFF, launch.shared_bytes);
    if (statics.bytes > 0) memset(statics.at, 0xFF, statics.bytes);
    emulate_switch(&b->worker, fiber_of(b->slots + (b->descending ? launch.threads - 1 : 0))->stack);
    bool whole = true;
    for (unsigned i = 0; i < GUARD; i++)
      whole &= b->shared[-1 - int(i)] == 0xA5 && b->shared[launch.shared_bytes + i] == 0xA5;
    if (whole) continue;
    pthread_mutex_lock(&launch.lock);
    if (!launch.failed) {
      snprintf(launch.error, launch.error_len, "block (%u, %u, %u) wrote outside its %u bytes of dynamic shared memory",
               b->index.x, b->index.y, b->index.z, launch.shared_bytes);
      launch.failed = 1;
    }
    pthread_mutex_unlock(&launch.lock);
  }
  if (stacks) give_stacks(stacks);
  delete[] memory;
  delete b;
  if (signals.ss_sp) {
    sigaltstack(&before, nullptr);
    delete[] static_cast<char*>(signals.ss_sp);
  }
  return stacks ? p : nullptr;
}

}  // namespace emulate

#include "lib/emulate_cuda.h"
#include "lib/emulate_mma.h"

#ifndef EMULATE_WITHOUT_LAUNCH
// Runs every block of a grid. `call` is what EXPORT made of an entry, of this library or another with the same headers;
// `args` is as emulate::call takes it. Returns 0, or 1 and a sentence in `error`.
extern "C" int hw_launch(void (*call)(void**), const unsigned grid[3], unsigned threads, unsigned shared_bytes,
                         void** args, char* error, unsigned error_len) {
  using namespace emulate;
  Launch launch{call, args, dim3(grid[0], grid[1], grid[2]), threads, shared_bytes, 0, 0, error, error_len, 0,
                PTHREAD_MUTEX_INITIALIZER};
  if (error_len > 0) error[0] = 0;
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, handle_faults);
  bool fits = grid[0] > 0 && grid[1] > 0 && grid[2] > 0 && grid[0] < 0x80000000u && grid[1] < 65536 && grid[2] < 65536;
  if (!fits || threads == 0 || threads > MAX_THREADS) {
    snprintf(error, error_len, "a grid of %u x %u x %u blocks of %u threads cannot be launched", grid[0], grid[1],
             grid[2], threads);
    return 1;
  }
  launch.blocks = uint64_t(grid[0]) * grid[1] * grid[2];
  cpu_set_t set;
  unsigned workers = sched_getaffinity(0, sizeof(set), &set) == 0 ? unsigned(CPU_COUNT(&set)) : 1;
  if (workers > launch.blocks) workers = unsigned(launch.blocks);
  if (workers > 64) workers = 64;
  pthread_t others[64];
  unsigned started = 0;
  while (started + 1 < workers && pthread_create(&others[started], nullptr, work, &launch) == 0) started++;
  bool ran = work(&launch) != nullptr;
  for (unsigned i = 0; i < started; i++) {
    void* result = nullptr;
    pthread_join(others[i], &result);
    ran |= result != nullptr;
  }
  if (!ran && !launch.failed) {
    snprintf(error, error_len, "no address space for the stacks of %u threads", threads);
    launch.failed = 1;
  }
  return launch.failed;
}
#endif

#endif
