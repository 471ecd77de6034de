// Gossip: one thread an element.

// A vector to be mixed in, and its weight.
struct Term {
    const void* memory;
    double weight;
};

struct MixJob {
    const void* memory;
    void* out;
    double* distances;
    const Term* terms;
    i64 numel;
    u32 element, term_count;
};

// Mix one element; return how far it moved, squared.
template <class Number>
__device__ double mix_element(const MixJob& job, i64 at) {
    Number total = 0, before = read<Number>(job.memory, job.element, at);
    for (u32 number = 0u; number < job.term_count; number++) {
        Term term = job.terms[number];
        Number product = (Number)term.weight * read<Number>(term.memory, job.element, at);
        total = number ? total + product : product;
    }
    double far = (double)write(job.out, job.element, at, total) - (double)before;
    return far * far;
}

// Leave the sum of what the block's threads hold in `total`. No atomics: runs differ in nothing, not even in this sum.
__device__ void add_up(double mine, double* total) {
    double* sums = (double*)shared_words;
    sums[threadIdx.x] = mine;
    __syncthreads();
    for (u32 width = blockDim.x; width > 1u; width = (width + 1u) >> 1) {
        u32 upper = (width + 1u) >> 1;
        if (threadIdx.x + upper < width) sums[threadIdx.x] += sums[threadIdx.x + upper];
        __syncthreads();
    }
    if (threadIdx.x == 0u) *total = sums[0];
}

// Fill `out`, which may be `memory`, with the weighted sum of terms, and `distances` with each block's part of how far
// it is from `memory`.
extern "C" __global__ void mix(const MixJob job) {
    double far = 0.0;
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < job.numel; at += (i64)gridDim.x * blockDim.x) {
        far += job.element == DOUBLE ? mix_element<double>(job, at) : mix_element<float>(job, at);
    }
    add_up(far, job.distances + blockIdx.x);
}
