// As much of CUDA as flexcomm/kernels/gpu asks for, on the host: each thread of a block is a fiber, and blocks come one
// after the other. Compiled by cuda_on_host.py, with KERNELS the path of the text to run.
//
// Fibers run in turn until they wait for others. Built with -fsanitize=thread, accesses of two fibers to one place are
// reported unless __syncthreads or __syncwarp lies between them, or fences do, see [Note: fences]. That fibers share a
// thread orders nothing, nor that blocks come one after the other, nor do atomic operations alone, nor votes and shuffles:
// CUDA says so of them, too. Of each eight bytes TSan remembers four accesses, so try several seeds.

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#define __device__ inline
#define __global__
#define __launch_bounds__(...)
#define UNROLL
#define ROLLED
#define GLOBAL(pointer)
#define OPAQUE(number)
#define HIDDEN __attribute__((no_sanitize("thread"), noinline))

#ifdef __SANITIZE_THREAD__
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
}
static const bool HAS_TSAN = true;
#else
static void* __tsan_create_fiber(unsigned) { return nullptr; }
static void* __tsan_get_current_fiber() { return nullptr; }
static void __tsan_switch_to_fiber(void*, unsigned) {}
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
static const bool HAS_TSAN = false;
#endif
static const unsigned NO_SYNC = 1u;

typedef unsigned int u32;
typedef unsigned long long u64;

struct Index {
    unsigned x;
};

static Index threadIdx, blockIdx, blockDim, gridDim;
static unsigned* shared_words;

static const unsigned MOST_THREADS = 256u;

// --- fibers ----------------------------------------------------------------------------------------------------------

static const unsigned STACK = 1u << 18, MOST_FENCES = 1u << 20, MOST_PUBLISHED = 1u << 12;

struct Fiber {
    ucontext_t context;
    char* stack;
    void* tsan;
    bool done;
    unsigned fence;  // its last one; 0: none
    bool pending[MOST_PUBLISHED];  // whether its next fence acquires what was published
};

// What a thread did by an atomic operation behind a fence; see [Note: fences].
struct Published {
    const void* at;
    unsigned fence;
};

// Where threads meet: how many have come, and how often all did.
struct Meeting {
    unsigned come, times;
    char in_turn[2];  // what TSan knows: of the next meeting another one, to which some come before all have left this
};

// Blocks of a launch that have no order: every so many, one reuses the fibers and the memory of another, after it.
static const unsigned RING = HAS_TSAN ? 6u : 1u;
static Fiber *fibers, all_fibers[RING][MOST_THREADS];
static Meeting block_meetings[RING], warp_meetings[RING][MOST_THREADS / 32u];
static ucontext_t scheduler;
static void* scheduler_tsan;
static unsigned current;
static unsigned slots[MOST_THREADS];
static unsigned long long slots64[MOST_THREADS];
static unsigned block_flags[2];
static Published published[MOST_PUBLISHED];
static unsigned published_count, fence_count;
static char fences[MOST_FENCES];
static unsigned long long progress;

static HIDDEN void switch_to_scheduler() {
    unsigned own = current;
    __tsan_switch_to_fiber(scheduler_tsan, NO_SYNC);
    swapcontext(&fibers[own].context, &scheduler);
}

static HIDDEN Meeting& own_block() { return block_meetings[blockIdx.x % RING]; }

static HIDDEN Meeting& own_warp() { return warp_meetings[blockIdx.x % RING][threadIdx.x >> 5]; }

// Let the members of a meeting go on if all have come.
static HIDDEN void end_meeting(Meeting& meeting, unsigned members) {
    if (meeting.come != members) return;
    meeting.come = 0u;
    meeting.times++;
}

static HIDDEN void meet(Meeting& meeting, unsigned members) {
    unsigned times = meeting.times;
    progress++;
    meeting.come++;
    end_meeting(meeting, members);
    while (meeting.times == times) switch_to_scheduler();
}

// Threads that have returned are not waited for.
static HIDDEN unsigned threads_alive() {
    unsigned alive = 0u;
    for (unsigned thread = 0u; thread < blockDim.x; thread++) alive += !fibers[thread].done;
    return alive;
}

// What each member did before it came is ordered before whatever they do when all have.
static HIDDEN void synchronize(Meeting& meeting, unsigned members) {
    char* turn = &meeting.in_turn[meeting.times & 1u];
    __tsan_release(turn);
    meet(meeting, members);
    __tsan_acquire(turn);
}

static void __syncthreads() { synchronize(own_block(), threads_alive()); }

static void __syncwarp() { synchronize(own_warp(), 32u); }

static HIDDEN bool __syncthreads_or(bool mine) {
    static unsigned turn;
    if (own_block().come == 0u) {
        turn ^= 1u;
        block_flags[turn] = 0u;
    }
    unsigned own = turn;
    block_flags[own] |= mine;
    __syncthreads();
    return block_flags[own] != 0u;
}

// Call read(slots of the warp) in every lane, once all have left theirs.
template <class Word, class Read>
static HIDDEN auto exchange(Word* all, Word mine, Read read) {
    Word* warp = all + (threadIdx.x & ~31u);
    warp[threadIdx.x & 31u] = mine;
    meet(own_warp(), 32u);
    auto found = read(warp);
    meet(own_warp(), 32u);
    return found;
}

static HIDDEN unsigned __ballot_sync(unsigned, bool mine) {
    return exchange(slots, (unsigned)mine, [](unsigned* warp) {
        unsigned word = 0u;
        for (unsigned lane = 0u; lane < 32u; lane++) word |= warp[lane] << lane;
        return word;
    });
}

static bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0u; }

static HIDDEN unsigned add_lanes(unsigned mine) {
    return exchange(slots, mine, [](unsigned* warp) {
        unsigned sum = 0u;
        for (unsigned lane = 0u; lane < 32u; lane++) sum += warp[lane];
        return sum;
    });
}

static HIDDEN unsigned largest_of_lanes(unsigned mine) {
    return exchange(slots, mine, [](unsigned* warp) { return *std::max_element(warp, warp + 32); });
}

// A lane outside the warp is the lane itself.
template <class Value>
static HIDDEN Value shuffle(Value mine, int source) {
    int lane = threadIdx.x & 31u, from = source < 0 || source > 31 ? lane : source;
    unsigned long long bits = 0u;
    memcpy(&bits, &mine, sizeof mine);
    bits = exchange(slots64, bits, [=](unsigned long long* warp) { return warp[from]; });
    memcpy(&mine, &bits, sizeof mine);
    return mine;
}

template <class Value>
static Value __shfl_sync(unsigned, Value mine, int source) {
    return shuffle(mine, source);
}

template <class Value>
static Value __shfl_up_sync(unsigned, Value mine, unsigned by) {
    return shuffle(mine, (int)(threadIdx.x & 31u) - (int)by);
}

template <class Value>
static Value __shfl_down_sync(unsigned, Value mine, unsigned by) {
    return shuffle(mine, (int)(threadIdx.x & 31u) + (int)by);
}

template <class Value>
static Value __shfl_xor_sync(unsigned, Value mine, unsigned mask) {
    return shuffle(mine, (int)((threadIdx.x & 31u) ^ mask));
}

// --- everything else -------------------------------------------------------------------------------------------------

static void require_room(unsigned used, unsigned most, const char* what) {
    if (used < most) return;
    fprintf(stderr, "a launch has more %s than %u\n", what, most);
    abort();
}

// [Note: fences] Atomic operations are relaxed, and a fence alone orders nothing. As in C++, what a thread did before a
// fence is ordered before what another does after one, if between their fences both worked on one place by atomic
// operations, the other after this thread. A fence is a place that TSan knows; threads behind it acquire what it held then,
// not what its thread did later.

static HIDDEN void note_atomic(const void* at) {
    Fiber& own = fibers[current];
    bool is_new = own.fence != 0u;
    for (unsigned number = 0u; number < published_count; number++) {
        if (published[number].at != at) continue;
        own.pending[number] = true;
        is_new = is_new && published[number].fence != own.fence;
    }
    if (!is_new) return;
    require_room(published_count, MOST_PUBLISHED, "atomic operations behind fences");
    published[published_count++] = {at, own.fence};
}

static HIDDEN void __threadfence() {
    if (!HAS_TSAN) return;
    Fiber& own = fibers[current];
    for (unsigned number = 0u; number < published_count; number++) {
        if (own.pending[number]) __tsan_acquire(fences + published[number].fence);
        own.pending[number] = false;
    }
    own.fence = ++fence_count;
    require_room(own.fence, MOST_FENCES, "fences");
    __tsan_release(fences + own.fence);
}

// Built without TSan, nothing has a fence.
template <class Word>
static Word atomicAdd(Word* at, Word value) {
    note_atomic(at);
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}

// Add 1, or go back from the largest to 0.
template <class Word>
static Word atomicExch(Word* at, Word value) {
    note_atomic(at);
    return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}

static unsigned atomicInc(unsigned* at, unsigned largest) {
    note_atomic(at);
    unsigned seen = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(at, &seen, seen >= largest ? 0u : seen + 1u, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
    return seen;
}

template <class Word>
static Word atomicOr(Word* at, Word value) {
    note_atomic(at);
    return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
}

template <class Word>
static Word atomicMax(Word* at, Word value) {
    note_atomic(at);
    Word seen = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (seen < value && !__atomic_compare_exchange_n(at, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return seen;
}

template <class Word>
static Word atomicMin(Word* at, Word value) {
    note_atomic(at);
    Word seen = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (seen > value && !__atomic_compare_exchange_n(at, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return seen;
}

using std::max;
using std::min;

static unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
static float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
static unsigned __popc(unsigned bits) { return (unsigned)std::popcount(bits); }
static unsigned __ffs(unsigned bits) { return (unsigned)__builtin_ffs((int)bits); }
static unsigned __clz(unsigned bits) { return (unsigned)std::countl_zero(bits); }
static void add_if_reaching(unsigned& count, float value, float bound) { count += value >= bound; }
static float max_nan(float a, float b) { return a != a || b != b ? __uint_as_float(0x7FFFFFFFu) : a > b ? a : b; }

#include KERNELS

// What nobody wrote must not look like zero.
static const u32 POISON = 0xFFFFABCDu, GUARD_WORDS = 1024u, MOST_SHARED = 1u << 18;
static void (*run_kernel)(const void* kernel, const void* argument);
static const void *the_kernel, *the_argument;

static char launch_begins, launch_ends, block_ends[RING];

static HIDDEN void run_fiber() {
    __tsan_acquire(&launch_begins);
    __tsan_acquire(&block_ends[blockIdx.x % RING]);
    run_kernel(the_kernel, the_argument);
    __tsan_release(&block_ends[blockIdx.x % RING]);
    __tsan_release(&launch_ends);
    fibers[current].done = true;
    progress++;
    end_meeting(own_block(), threads_alive());
    switch_to_scheduler();
}

static HIDDEN void start_fiber(unsigned thread) {
    Fiber& fiber = fibers[thread];
    if (!fiber.stack) {
        fiber.stack = new char[STACK];
        fiber.tsan = __tsan_create_fiber(0u);
    }
    fiber.done = false;
    fiber.fence = 0u;
    std::fill_n(fiber.pending, HAS_TSAN ? MOST_PUBLISHED : 0u, false);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_fiber, 0);
}

// Run a block of the launch; return whether it left alone the shared memory it had not asked for.
static HIDDEN bool run_block(u32 threads, u64 shared_nbytes, u32 seed) {
    u64 words = shared_nbytes / sizeof(u32);
    static u32* all_shared[RING];
    u32*& own = all_shared[blockIdx.x % RING];
    if (!own) own = (u32*)aligned_alloc(16, MOST_SHARED);
    shared_words = own;
    fibers = all_fibers[blockIdx.x % RING];
    for (u64 at = 0u; at < words + GUARD_WORDS; at++) shared_words[at] = POISON;
    own_block() = {};
    for (Meeting& meeting : warp_meetings[blockIdx.x % RING]) meeting = {};
    for (u32 thread = 0u; thread < threads; thread++) start_fiber(thread);
    scheduler_tsan = __tsan_get_current_fiber();
    for (bool left = true; left;) {
        unsigned long long before = progress;
        left = false;
        for (u32 number = 0u; number < threads; number++) {
            u32 thread = (number * (2u * seed + 1u) + seed) % threads;  // threads are a power of two
            if (fibers[thread].done) continue;
            left = true;
            current = thread;
            threadIdx.x = thread;
            __tsan_switch_to_fiber(fibers[thread].tsan, NO_SYNC);
            swapcontext(&scheduler, &fibers[thread].context);
        }
        if (left && progress == before) {
            fprintf(stderr, "threads of block %u wait for each other for ever\n", blockIdx.x);
            abort();
        }
    }
    bool within = true;
    for (u64 at = words; at < words + GUARD_WORDS; at++) within = within && shared_words[at] == POISON;
    return within;
}

// Run a kernel whose one argument is such a structure; return whether blocks kept to the shared memory they asked for.
template <class Argument>
static HIDDEN bool launch(const void* kernel, u32 grid, u32 threads, u64 shared_nbytes, const void* argument,
                          u64 nbytes, u32 seed) {
    static std::mutex alone;
    std::lock_guard<std::mutex> lock(alone);
    if (nbytes != sizeof(Argument)) {
        fprintf(stderr, "got an argument of %llu bytes, needed %zu\n", nbytes, sizeof(Argument));
        abort();
    }
    run_kernel = [](const void* kernel, const void* argument) {
        ((void (*)(const Argument))kernel)(*(const Argument*)argument);
    };
    the_kernel = kernel;
    the_argument = argument;
    blockDim.x = threads;
    gridDim.x = grid;
    published_count = fence_count = 0u;
    __tsan_release(&launch_begins);
    bool within = true;
    for (blockIdx.x = 0u; blockIdx.x < grid; blockIdx.x++) within = run_block(threads, shared_nbytes, seed) && within;
    __tsan_acquire(&launch_ends);
    return within;
}

// Defines launch_Argument().
#define LAUNCHES(Argument)                                                                                    \
    extern "C" HIDDEN bool launch_##Argument(const void* kernel, u32 grid, u32 threads, u64 shared_nbytes,    \
                                             const void* argument, u64 nbytes, u32 seed) {                    \
        return launch<Argument>(kernel, grid, threads, shared_nbytes, argument, nbytes, seed);                \
    }

LAUNCHED
