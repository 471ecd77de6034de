// Numbers as bits, alike in every kernel set: strings of bits, value codes, hashes, and elements of any dtype.
//
// Bits must be those of every other kernel set: no fused multiply-add unless it is written, no flushing of denormals,
// divisions as IEEE has them (options in compile.py), and every sum in the order that flexcomm/kernels/reference gives.
// Float atomics have no order, so there is none.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

enum Selection { EVERYTHING, TOP_K, THRESHOLD, RANDOM_K, STRIDING };
enum ValueCode { FP32, BF16, FP16, INT8, SIGN, SIGN2 };
enum IndexCode { NO_INDEX, PACKED, ELIAS_FANO, BITMAP };
enum Element { FLOAT, BFLOAT16, HALF, DOUBLE };

const u32 INFINITE = 0x7F800000u;
const u32 MAGNITUDE = 0x7FFFFFFFu;
const u32 TOO_LARGE = 0x71800000u;  // 2**100: elements stay below
const u32 LARGEST_BF16 = 0x7F7Fu;
const u32 LARGEST_FP16 = 0x7BFFu;
const u32 GOLDEN = 0x9E3779B9u;
const u32 ALL = 0xFFFFFFFFu;

// --- strings of bits -------------------------------------------------------------------------------------------------
//
// Little-endian 32-bit words, lowest bit first, zero before anything is put. Entries own disjoint bits, so atomicOr puts
// them in any order with the same result.

template <class Position>
__device__ void put(u32* words, Position position, u32 value, u32 width) {
    u32* word = words + (position >> 5);
    u32 shift = (u32)position & 31u;
    if (width == 32u && shift == 0u) {
        *word = value;  // nobody else's bits are in it, and a store costs less than an atomic
        return;
    }
    u64 spread = (u64)value << shift;
    // Zeros change nothing, and the second word may be beyond the payload's last.
    if ((u32)spread) atomicOr(word, (u32)spread);
    if ((u32)(spread >> 32)) atomicOr(word + 1, (u32)(spread >> 32));
}

template <class Position>
__device__ u32 get(const u32* words, Position position, u32 width) {
    if (width == 0u) return 0u;
    const u32* word = words + (position >> 5);
    u32 shift = (u32)position & 31u;
    u32 value = word[0] >> shift;
    if (shift + width > 32u) value |= word[1] << (32u - shift);
    return value & (ALL >> (32u - width));
}

__device__ u32 mix32(u32 value) {
    value ^= value >> 16;
    value *= 0x85EBCA6Bu;
    value ^= value >> 13;
    value *= 0xC2B2AE35u;
    return value ^ (value >> 16);
}

// What a word adds to the checksum of its buffer.
__device__ u32 hashed(u32 word, u32 place) { return mix32(word ^ (place * GOLDEN)); }

// --- value codes -----------------------------------------------------------------------------------------------------

__device__ u32 magnitude_of(float value) { return __float_as_uint(value) & MAGNITUDE; }

__device__ u32 bf16_bits(u32 bits) { return (u32)(((u64)bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16); }

__device__ u32 bf16_up(float magnitude) { return min((__float_as_uint(magnitude) + 0xFFFFu) >> 16, LARGEST_BF16); }

__device__ u32 saturated_bf16(float magnitude) {
    u32 bits = __float_as_uint(magnitude);  // no sign, so nothing overflows
    return min((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16, LARGEST_BF16);
}

__device__ float bf16_value(u32 code) { return __uint_as_float(code << 16); }

__device__ u32 fp16_bits(u32 magnitude) {
    if (magnitude >= 0x47800000u) return 0x7C00u;
    if (magnitude >= 0x38800000u) return (magnitude + 0x0FFFu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    // Below the smallest normal float16 its step is 2**-24, which is also the step of float32 at one half.
    return __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3F000000u;
}

__device__ float fp16_value(u32 half) {
    u32 shifted = (half & 0x7FFFu) << 13;
    float finite = __uint_as_float(shifted) * 5192296858534827628530496329220096.0f;  // 2**112
    u32 magnitude = shifted < 0x0F800000u ? __float_as_uint(finite) : shifted | INFINITE;
    return __uint_as_float(magnitude | ((half & 0x8000u) << 16));
}

struct Scales {
    float scale, step;
};

__device__ u32 quantise(u32 values, float value, Scales scales) {
    u32 bits = __float_as_uint(value), negative = bits >> 31;
    if (values == FP32) return bits;
    if (values == BF16) return (negative << 15) | saturated_bf16(fabsf(value));
    if (values == FP16) return (negative << 15) | min(fp16_bits(bits & MAGNITUDE), LARGEST_FP16);
    if (values == INT8) return scales.scale > 0.0f ? (u32)(int)rintf(value / scales.scale) & 0xFFu : 0u;
    if (values == SIGN) return negative;
    float level = scales.step > 0.0f ? rintf((fabsf(value) - scales.scale) / scales.step) : 0.0f;
    // Of a broken number, any level; but only its own bits are put.
    return (((u32)level & 3u) << 1) | negative;
}

__device__ float dequantise(u32 values, u32 code, Scales scales) {
    if (values == FP32) return __uint_as_float(code);
    if (values == BF16) return bf16_value(code);
    if (values == FP16) return fp16_value(code);
    if (values == INT8) return (float)((int)(code ^ 0x80u) - 0x80) * scales.scale;
    float magnitude = scales.scale;
    if (values == SIGN2) magnitude = magnitude + (float)(code >> 1) * scales.step;
    return code & 1u ? -magnitude : magnitude;
}

// --- elements --------------------------------------------------------------------------------------------------------

__device__ u32 element_nbytes(u32 element) { return element == DOUBLE ? 8u : element == FLOAT ? 4u : 2u; }

// Of 16 bits. What is decoded or mixed may be infinite or not a number, and stays so.
__device__ float half_value(u32 element, u32 half) { return element == BFLOAT16 ? bf16_value(half) : fp16_value(half); }

__device__ u32 half_code(u32 element, float value) {
    u32 bits = __float_as_uint(value), magnitude = bits & MAGNITUDE;
    if (element == BFLOAT16) return magnitude > INFINITE ? 0x7FC0u : bf16_bits(bits);
    return magnitude > INFINITE ? 0x7E00u : ((bits >> 16) & 0x8000u) | fp16_bits(magnitude);
}

// Number is what is computed in: float, or double.
template <class Number>
__device__ Number read(const void* memory, u32 element, i64 at) {
    if (element == FLOAT) return ((const float*)memory)[at];
    if (element == DOUBLE) return (Number)((const double*)memory)[at];
    return half_value(element, ((const u16*)memory)[at]);
}

// Write a number; return it as it will be read.
template <class Number>
__device__ Number write(void* memory, u32 element, i64 at, Number value) {
    if (element == FLOAT) return ((float*)memory)[at] = (float)value;
    if (element == DOUBLE) return (Number)(((double*)memory)[at] = value);
    u32 half = half_code(element, (float)value);
    ((u16*)memory)[at] = (u16)half;
    return half_value(element, half);
}
