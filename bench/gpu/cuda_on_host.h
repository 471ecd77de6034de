// As much of CUDA as the kernels ask for, on the host, with one thread of the machine: threads of a block are fibers,
// which take turns wherever they wait for each other, so that warps have ballots, shuffles and reductions.
//
// Include this, then the text of the kernels. `COUNT(name)` counts how many warps pass it: between two points where all
// lanes of a warp meet, as many as the lane that passes most often.

#pragma once
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define CUDA_ON_HOST 1
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#ifndef __shared__
#define __shared__ static
#endif

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace host {

constexpr unsigned WARP = 32u, MOST_WARPS = 32u;
constexpr size_t STACK_NBYTES = 1u << 17;

// How many warps passed a mark: `passes` of each lane are those since its warp last met.
struct Counter {
    const char* name;
    unsigned long long total = 0;
    unsigned passes[MOST_WARPS][WARP] = {};

    explicit Counter(const char* given) : name(given) { all().push_back(this); }
    static std::vector<Counter*>& all() {
        static std::vector<Counter*> counters;
        return counters;
    }
    void pass() { passes[threadIdx.x / WARP][threadIdx.x % WARP]++; }
    static void warp_met(unsigned warp) {
        for (Counter* one : all()) {
            unsigned(&lanes)[WARP] = one->passes[warp];
            one->total += *std::max_element(lanes, lanes + WARP);
            std::fill(lanes, lanes + WARP, 0u);
        }
    }
};

// Lanes that meet at a collective with the same mask. Values are kept for one meeting more: some lanes read late.
struct Meeting {
    unsigned arrived = 0, round = 0;
    unsigned long long values[2][WARP] = {};
};

struct Warp {
    unsigned alive = 0;
    std::map<unsigned, Meeting> meetings;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_NBYTES]};
    bool ended = false;
};

static std::vector<Fiber> fibers;
static Warp warps[MOST_WARPS];
static ucontext_t scheduler;
static unsigned current, alive_threads, at_barrier, barrier_round;
static void (*start_thread)();

inline void wait_turn() {
    unsigned mine = current;
    swapcontext(&fibers[mine].context, &scheduler);
    threadIdx.x = mine;
}

inline void finish(Meeting& meeting, unsigned mask, unsigned warp) {
    if (meeting.arrived == 0u || (meeting.arrived & warps[warp].alive) != (mask & warps[warp].alive)) return;
    meeting.arrived = 0u;
    meeting.round++;
    if ((mask & warps[warp].alive) == warps[warp].alive) Counter::warp_met(warp);
}

// Wait for all lanes of the mask, and return what each of them brought.
inline const unsigned long long* meet(unsigned mask, unsigned long long value) {
    unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Meeting& meeting = warps[warp].meetings[mask];
    unsigned round = meeting.round;
    if (!(mask >> lane & 1u)) {
        std::fprintf(stderr, "lane %u is not in the mask %08x that it gave\n", lane, mask);
        std::abort();
    }
    meeting.values[round & 1u][lane] = value;
    meeting.arrived |= 1u << lane;
    finish(meeting, mask, warp);
    while (meeting.round == round) wait_turn();
    return meeting.values[round & 1u];
}

inline void finish_barrier() {
    if (at_barrier == 0u || at_barrier < alive_threads) return;
    at_barrier = 0u;
    barrier_round++;
    for (unsigned warp = 0; warp * WARP < blockDim.x; warp++) Counter::warp_met(warp);
}

inline void run_thread() {
    start_thread();
    Warp& warp = warps[current / WARP];
    warp.alive &= ~(1u << current % WARP);
    alive_threads--;
    fibers[current].ended = true;
    // Those who wait for a thread that has ended wait no longer.
    for (auto& [mask, meeting] : warp.meetings) finish(meeting, mask, current / WARP);
    finish_barrier();
}

// Run `thread` as all threads of all blocks, block by block.
inline void run_blocks(unsigned grid, unsigned threads, void (*thread)()) {
    start_thread = thread;
    gridDim = {grid, 1, 1};
    blockDim = {threads, 1, 1};
    fibers.resize(threads);
    for (blockIdx = {0, 0, 0}; blockIdx.x < grid; blockIdx.x++) {
        alive_threads = threads;
        at_barrier = 0u;
        for (unsigned warp = 0; warp * WARP < threads; warp++) {
            unsigned lanes = std::min(WARP, threads - warp * WARP);
            warps[warp] = {lanes == WARP ? ~0u : (1u << lanes) - 1u, {}};
        }
        for (Fiber& one : fibers) {
            getcontext(&one.context);
            one.context.uc_stack.ss_sp = one.stack.get();
            one.context.uc_stack.ss_size = STACK_NBYTES;
            one.context.uc_link = &scheduler;
            one.ended = false;
            makecontext(&one.context, run_thread, 0);
        }
        while (alive_threads) {
            for (current = 0; current < threads; current++) {
                if (fibers[current].ended) continue;
                threadIdx = {current, 0, 0};
                swapcontext(&scheduler, &fibers[current].context);
            }
        }
        for (unsigned warp = 0; warp * WARP < threads; warp++) Counter::warp_met(warp);
    }
}

template <class To, class From>
To bits(From from) {
    To to{};
    static_assert(sizeof(From) <= sizeof(unsigned long long));
    std::memcpy(&to, &from, std::min(sizeof to, sizeof from));
    return to;
}

template <class Combine>
unsigned reduce(unsigned mask, unsigned value, unsigned start, Combine combine) {
    const unsigned long long* values = meet(mask, value);
    for (unsigned lane = 0; lane < WARP; lane++) {
        if (mask >> lane & 1u) start = combine(start, (unsigned)values[lane]);
    }
    return start;
}

template <class T>
T shuffle(unsigned mask, T value, int from) {
    const unsigned long long* values = meet(mask, bits<unsigned long long>(value));
    return from < 0 || from >= (int)WARP ? value : bits<T>(values[from]);
}

inline int lane() { return (int)(threadIdx.x % WARP); }

}  // namespace host

#define COUNT(name)                         \
    do {                                    \
        static host::Counter counter(#name); \
        counter.pass();                     \
    } while (0)

// The number of marks passed so far is not known beforehand: `count_name` returns null behind the last one.
extern "C" inline __attribute__((used)) const char* count_name(int i) {
    return i < (int)host::Counter::all().size() ? host::Counter::all()[i]->name : nullptr;
}
extern "C" inline __attribute__((used)) unsigned long long count_value(int i) { return host::Counter::all()[i]->total; }
extern "C" inline __attribute__((used)) void count_reset() {
    for (host::Counter* one : host::Counter::all()) one->total = 0;
}

inline void __syncthreads() {
    unsigned round = host::barrier_round;
    host::at_barrier++;
    host::finish_barrier();
    while (host::barrier_round == round) host::wait_turn();
}
inline void __syncwarp(unsigned mask = ~0u) { host::meet(mask, 0); }
inline void __threadfence() {}
inline void __threadfence_block() {}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const unsigned long long* values = host::meet(mask, predicate != 0);
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < host::WARP; lane++) {
        if (mask >> lane & 1u) ballot |= (unsigned)(values[lane] != 0) << lane;
    }
    return ballot;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0u; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    return host::reduce(mask, value, 0u, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return host::reduce(mask, value, 0u, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
    return host::reduce(mask, value, ~0u, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
    return host::reduce(mask, value, 0u, [](unsigned a, unsigned b) { return a | b; });
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
    return host::shuffle(mask, value, from & 31);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    return host::shuffle(mask, value, host::lane() - (int)by);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by) {
    return host::shuffle(mask, value, host::lane() + (int)by);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int by) {
    return host::shuffle(mask, value, host::lane() ^ by);
}

// One thread runs at a time, so nothing can come between.
template <class Word>
Word atomicAdd(Word* at, Word value) {
    Word before = *at;
    *at = before + value;
    return before;
}
template <class Word>
Word atomicOr(Word* at, Word value) {
    Word before = *at;
    *at = before | value;
    return before;
}
template <class Word>
Word atomicMax(Word* at, Word value) {
    Word before = *at;
    *at = std::max(before, value);
    return before;
}
template <class Word>
Word atomicMin(Word* at, Word value) {
    Word before = *at;
    *at = std::min(before, value);
    return before;
}

using std::max;
using std::min;
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned word) { return std::bit_cast<float>(word); }
inline int __popc(unsigned word) { return std::popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }
inline int __clz(int word) { return std::countl_zero((unsigned)word); }
template <class T>
T __ldg(const T* at) {
    return *at;
}
