// What the rest of the text asks of a device beyond C++, where CUDA says it in other words or not on every device.
//
// Tests run the same text on the host, and define all of this themselves.

#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define GLOBAL(pointer) __builtin_assume(__isGlobal(pointer))
#define OPAQUE(number) asm("" : "+l"(number))  // of 64 bits: the compiler is not to know what it was made of

extern __shared__ __align__(16) unsigned int shared_words[];

// The larger one, or NaN if one is NaN.
__device__ float max_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a != a || b != b ? a + b : fmaxf(a, b);
#endif
}

// Count one more if the value reaches the bound: two instructions, where compilers make three.
__device__ void add_if_reaching(unsigned int& count, float value, float bound) {
    asm("{\n\t.reg .pred %%reaches;\n\tsetp.ge.f32 %%reaches, %1, %2;\n\t@%%reaches add.u32 %0, %0, 1;\n\t}"
        : "+r"(count)
        : "f"(value), "f"(bound));
}

__device__ unsigned int add_lanes(unsigned int mine) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(0xFFFFFFFFu, mine);
#else
    for (unsigned int half = 16u; half; half >>= 1) mine += __shfl_xor_sync(0xFFFFFFFFu, mine, half);
    return mine;
#endif
}

__device__ unsigned int largest_of_lanes(unsigned int mine) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xFFFFFFFFu, mine);
#else
    for (unsigned int half = 16u; half; half >>= 1) {
        unsigned int other = __shfl_xor_sync(0xFFFFFFFFu, mine, half);
        mine = mine > other ? mine : other;
    }
    return mine;
#endif
}
#endif
