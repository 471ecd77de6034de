// As much of CUDA as flexcomm/kernels/gpu/codec.cu asks for, on the host: a thread of a block is one of the machine, and
// blocks come one after the other. Compiled by cuda_on_host.py, with KERNELS the path of the text to run.

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <thread>
#include <vector>

#define __device__ inline
#define __global__
#define __shared__
#define __launch_bounds__(...)

struct Index {
    unsigned x;
};

static thread_local Index threadIdx, blockIdx;
static Index blockDim, gridDim;
static std::barrier<>* meeting;

static void __syncthreads() { meeting->arrive_and_wait(); }

template <class Word>
static void atomicAdd(Word* at, Word value) {
    __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}

template <class Word>
static void atomicOr(Word* at, Word value) {
    __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
}

template <class Word>
static void atomicMax(Word* at, Word value) {
    Word seen = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (seen < value && !__atomic_compare_exchange_n(at, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

template <class Word>
static void atomicMin(Word* at, Word value) {
    Word seen = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (seen > value && !__atomic_compare_exchange_n(at, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

using std::max;
using std::min;

static unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
static float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
static unsigned __popc(unsigned bits) { return (unsigned)std::popcount(bits); }
static unsigned __ffs(unsigned bits) { return (unsigned)__builtin_ffs((int)bits); }

#include KERNELS

static const unsigned POISON = 0xFFFFABCDu;  // as a float, not a number: what nobody wrote must not look like zero
alignas(8) u32 shared_words[1u << 14];

static void poison_shared_words() {
    for (u32& word : shared_words) word = POISON;
}

extern "C" u64 job_nbytes() { return sizeof(Job); }

// Run a kernel; return whether it left alone the shared memory it had not asked for.
extern "C" int launch(void (*kernel)(const Job), u32 grid, u32 threads, u64 shared_nbytes, const Job* job) {
    std::barrier<> barrier(threads);
    meeting = &barrier;
    blockDim.x = threads;
    gridDim.x = grid;
    std::atomic<int> within = 1;
    auto run = [&](u32 number) {
        threadIdx.x = number;
        for (blockIdx.x = 0u; blockIdx.x < grid; blockIdx.x++) {
            if (number == 0u) poison_shared_words();
            barrier.arrive_and_wait();
            kernel(*job);
            barrier.arrive_and_wait();
            u64 first = shared_nbytes / sizeof(u32);
            for (u64 at = first; number == 0u && at < std::size(shared_words); at++) {
                if (shared_words[at] != POISON) within = 0;
            }
        }
    };
    std::vector<std::jthread> others;
    for (u32 number = 1u; number < threads; number++) others.emplace_back(run, number);
    run(0u);
    others.clear();
    return within;
}
