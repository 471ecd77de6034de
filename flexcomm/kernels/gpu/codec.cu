// The GPU's loops: a block reads its chunks once, works on them in shared memory, and writes them once.
//
// Every kernel takes one Job by value, so a launch needs no copy of its arguments to the device, and all kernels can be
// called alike: by CuPy on a device, and by a few lines of C++ where there is none. For the same reason there is no
// warp intrinsic here, no include, and no shared variable but one array whose parts launcher.py lays out.
//
// Bits must be those of every other kernel set: no fused multiply-add, no flushing of denormals, divisions as IEEE has
// them (options in launcher.py), and every sum in the order that flexcomm/kernels/reference gives. Float atomics have
// no order, so there is none. Bit strings are little-endian 32-bit words, lowest bit first, zero before anything is
// put; entries own disjoint bits, so atomicOr puts them in any order with the same result.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

enum Selection { EVERYTHING, TOP_K, THRESHOLD, RANDOM_K, STRIDING };
enum ValueCode { FP32, BF16, FP16, INT8, SIGN, SIGN2 };
enum IndexCode { NO_INDEX, PACKED, ELIAS_FANO, BITMAP };
enum Element { FLOAT, BFLOAT16, HALF, DOUBLE };
enum Operation { BUTTERFLY, MIX, SCALE, ADD_SCALED };
enum Problem { INDEX_PROBLEM = 7, SCALE_PROBLEM, VALUE_PROBLEM, NO_PROBLEM };  // as flexcomm/kernels/base.py has them

const u32 INFINITE = 0x7F800000u;
const u32 MAGNITUDE = 0x7FFFFFFFu;
const u32 LARGEST_BF16 = 0x7F7Fu;
const u32 LARGEST_FP16 = 0x7BFFu;
const u32 GOLDEN = 0x9E3779B9u;
const i64 CHECKSUM_WORD = 12;
const u32 SUM_LANES = 32;
const u32 BIN_SHIFT = 16;

struct alignas(16) Step {
    int code, i, j, spare;
    float c0, c1, c2, c3;
};

// A program of flexcomm/kernels/butterflies.py, its steps sorted into levels that do not depend on one another.
struct Transform {
    i64 height, levels;
    const int* inputs;
    const int* outputs;
    const int* bounds;
    const Step* steps;
};

// Where one sender's sections begin, in words, how its indices are written, and how many entries precede each chunk;
// without that list, `k` in every chunk.
struct Section {
    i64 indices, scales, values, code, low_bits, entry_bits, chunk_bits, value_padding;
    const i64* before;
};

// A vector to be mixed in, and its weight.
struct Term {
    const void* memory;
    double weight;
};

// A plan, a layout, a sample key, and where everything is. launcher.py mirrors it, field by field.
struct Job {
    i64 rows, cols, chunk_rows, chunk_cols, grid_cols, chunk_numel, chunks;
    i64 transformed, selection, k, tau_bits, values, value_bits, scales, count_bits, key, start;
    i64 element, numel, first, senders, divisor, term_count;  // without a divisor, averages are over contributors
    // The block's share: chunks side by side, distance of rows in each of its areas, and where those begin, in words.
    i64 group, pitch, pitch_down, pitch_along, turned_at, marks_at, ranks_at, block_words;
    float decay, factor, stays, padding;
    Transform down, along;
    Section own;
    const Section* sections;
    void* memory;
    const float* state;
    float* next_state;
    u32* words;
    i64* counts;
    u64* answer;
    u32* workspace;
    const Term* terms;
    void* out;
    double* distances;
};

// kernels.py starts at most 256 threads a block. Four such blocks fit a multiprocessor if each thread has 64 registers.
#define RESIDENT __launch_bounds__(256, 4)

alignas(8) extern __shared__ u32 shared_words[];

// --- bits ------------------------------------------------------------------------------------------------------------

__device__ void put(u32* words, i64 position, u32 value, u32 width) {
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

__device__ u32 get(const u32* words, i64 position, u32 width) {
    if (width == 0u) return 0u;
    const u32* word = words + (position >> 5);
    u32 shift = (u32)position & 31u;
    u64 value = word[0];
    if (shift + width > 32u) value |= (u64)word[1] << 32;
    return (u32)(value >> shift) & (0xFFFFFFFFu >> (32u - width));
}

__device__ u32 mix32(u32 value) {
    value ^= value >> 16;
    value *= 0x85EBCA6Bu;
    value ^= value >> 13;
    value *= 0xC2B2AE35u;
    return value ^ (value >> 16);
}

// --- numbers, as bits ------------------------------------------------------------------------------------------------

__device__ u32 magnitude_of(float value) { return __float_as_uint(value) & MAGNITUDE; }

__device__ u32 bf16_bits(u32 bits) { return (u32)(((u64)bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16); }

__device__ u32 bf16_up(float magnitude) { return min((__float_as_uint(magnitude) + 0xFFFFu) >> 16, LARGEST_BF16); }

__device__ u32 saturated_bf16(float magnitude) {
    return min(bf16_bits(__float_as_uint(magnitude)), LARGEST_BF16);
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

// --- a block, and the team of its threads that works on one chunk -----------------------------------------------------
//
// The team is either the whole block, or, for short chunks of one row, a single thread. Both run the same text: a team of
// one has nobody to wait for, and what it would add up is already its own.

struct Block {
    u32 thread, threads;   // of the block
    u32 rank, size;        // of the team
    u32 length;            // elements of a chunk
    u32 lane, pitch;       // distance of elements, see cell()
    float* row;            // coefficients of the chunks; before that, elements going down the columns
    float* turned;         // elements going along the rows; outside transforms, whatever a pass needs per element
    u32* marks;            // bit i says whether element i is sent
    u32* ranks;            // how many marks precede each word of them
    u32 stride;            // distance of one team's words
    u32* tally;            // three counters, see combined()
    u32* scan;             // two words a thread
    u32 turn;

    __device__ float& cell(u32 i) const { return row[i * pitch + lane]; }
    __device__ float& spare(u32 i) const { return turned[i * pitch + lane]; }
    __device__ u32 magnitude(u32 i) const { return magnitude_of(cell(i)); }
    __device__ u32& mark_word(u32 word) const { return marks[word * stride + lane]; }
    __device__ u32& rank_word(u32 word) const { return ranks[word * stride + lane]; }

    __device__ void sync() const {
        if (size > 1u) __syncthreads();
    }

    __device__ u32 sum(u32 mine) {
        if (size == 1u) return mine;
        if (mine) atomicAdd(tally + turn, mine);
        return combined();
    }

    __device__ u32 largest(u32 mine) {
        if (size == 1u) return mine;
        if (mine) atomicMax(tally + turn, mine);
        return combined();
    }

    // Three counters in turn need one barrier: while one is read, the one before is cleared, and the next is zero.
    __device__ u32 combined() {
        __syncthreads();
        u32 total = tally[turn];
        if (rank == 0u) tally[turn == 0u ? 2u : turn - 1u] = 0u;
        turn = turn == 2u ? 0u : turn + 1u;
        return total;
    }

    // Return the sum of what the threads before hold, and the sum of all. The team must meet before it asks again.
    __device__ u32 before_mine(u32 mine, u32* total) const {
        u32 source = 0u;
        scan[rank] = mine;
        __syncthreads();
        for (u32 distance = 1u; distance < size; distance <<= 1) {
            u32 value = scan[source + rank];
            if (rank >= distance) value += scan[source + rank - distance];
            source = size - source;
            scan[source + rank] = value;
            __syncthreads();
        }
        u32 through_mine = scan[source + rank];
        *total = scan[source + size - 1u];
        return through_mine - mine;
    }
};

__device__ void clear_marks(Block& block, u32 length) {
    for (u32 word = block.rank; word < (length + 31u) >> 5; word += block.size) block.mark_word(word) = 0u;
    block.sync();
}

__device__ void mark(Block& block, u32 i) {
    if (block.size == 1u) {
        block.mark_word(i >> 5) |= 1u << (i & 31u);
    } else {
        atomicOr(&block.mark_word(i >> 5), 1u << (i & 31u));
    }
}

// Rank the marks of so many elements; return how many there are.
__device__ u32 rank_marks(Block& block, u32 length) {
    block.sync();
    u32 words = (length + 31u) >> 5;
    u32 share = (words + block.size - 1u) / block.size;
    u32 first = min(block.rank * share, words), last = min(first + share, words);
    u32 mine = 0u, total;
    for (u32 word = first; word < last; word++) mine += __popc(block.mark_word(word));
    total = mine;
    u32 before = block.size == 1u ? 0u : block.before_mine(mine, &total);
    for (u32 word = first; word < last; word++) {
        block.rank_word(word) = before;
        before += __popc(block.mark_word(word));
    }
    block.sync();
    return total;
}

// Call visit(position, entry) for every mark, after rank_marks().
template <class Visit>
__device__ void visit_marks(Block& block, u32 length, Visit visit) {
    for (u32 word = block.rank; word < (length + 31u) >> 5; word += block.size) {
        u32 entry = block.rank_word(word);
        for (u32 bits = block.mark_word(word); bits; bits &= bits - 1u) visit(32u * word + __ffs(bits) - 1u, entry++);
    }
}

// Call work(block, first, here) for the block's chunks, a group at a time: so many from `first` on.
template <class Work>
__device__ void by_group(const Job& job, Work work) {
    u32* base = job.workspace ? job.workspace + blockIdx.x * job.block_words : shared_words;
    u32* counters = job.workspace ? shared_words : shared_words + job.block_words;
    Block block;
    block.thread = threadIdx.x;
    block.threads = blockDim.x;
    block.rank = job.group > 1 ? 0u : threadIdx.x;
    block.size = job.group > 1 ? 1u : blockDim.x;
    block.lane = job.group > 1 ? threadIdx.x : 0u;
    block.length = (u32)job.chunk_numel;
    block.pitch = (u32)job.pitch;
    block.row = (float*)base;
    block.turned = (float*)(base + job.turned_at);
    block.marks = base + job.marks_at;
    block.ranks = base + job.ranks_at;
    block.stride = (u32)job.group;
    block.tally = counters;
    block.scan = counters + 3;
    block.turn = 0u;
    if (block.thread < 3u) counters[block.thread] = 0u;
    __syncthreads();
    for (i64 first = blockIdx.x * job.group; first < job.chunks; first += gridDim.x * job.group) {
        work(block, first, (u32)(job.chunks - first < job.group ? job.chunks - first : job.group));
        __syncthreads();
    }
}

// Call work(chunk) once in each team that has one of the group's chunks.
template <class Work>
__device__ void by_team(Block& block, i64 first, u32 here, Work work) {
    if (block.lane < here) work(first + block.lane);
    __syncthreads();
}

// Call visit(g, k, cell) for coefficient k of the group's chunk g, which is in that cell of `row`.
template <class Visit>
__device__ void by_coefficient(const Block& block, u32 here, Visit visit) {
    for (u32 e = block.thread; e < here * block.length; e += block.threads) {
        u32 g = e / block.length, k = e % block.length;
        visit(g, k, block.row[k * block.pitch + g]);
    }
}

// --- elements --------------------------------------------------------------------------------------------------------

// Of 16 bits. What is decoded or mixed may be infinite or not a number, and stays so.
__device__ float half_value(i64 element, u32 half) { return element == BFLOAT16 ? bf16_value(half) : fp16_value(half); }

__device__ u32 half_code(i64 element, float value) {
    u32 bits = __float_as_uint(value), magnitude = bits & MAGNITUDE;
    if (element == BFLOAT16) return magnitude > INFINITE ? 0x7FC0u : bf16_bits(bits);
    return magnitude > INFINITE ? 0x7E00u : ((bits >> 16) & 0x8000u) | fp16_bits(magnitude);
}

// Number is what is computed in: float, or double.
template <class Number>
__device__ Number read(const void* memory, i64 element, i64 at) {
    if (element == FLOAT) return ((const float*)memory)[at];
    if (element == DOUBLE) return (Number)((const double*)memory)[at];
    return half_value(element, ((const u16*)memory)[at]);
}

// Write a number; return it as it will be read.
template <class Number>
__device__ Number write(void* memory, i64 element, i64 at, Number value) {
    if (element == FLOAT) return ((float*)memory)[at] = (float)value;
    if (element == DOUBLE) return (Number)(((double*)memory)[at] = value);
    u32 half = half_code(element, (float)value);
    ((u16*)memory)[at] = (u16)half;
    return half_value(element, half);
}

// Return where element (i, j) of a chunk is, or -1 if it is beyond the rim.
__device__ i64 place_of(const Job& job, i64 chunk, u32 i, u32 j) {
    // No tensor has 2**32 chunks, and a device has no instruction that divides, least of all 64 bits.
    u32 down = (u32)chunk / (u32)job.grid_cols, across = (u32)chunk % (u32)job.grid_cols;
    i64 row = down * job.chunk_rows + i, col = across * job.chunk_cols + j;
    return row < job.rows && col < job.cols ? row * job.cols + col : -1;
}

__device__ float load_element(const Job& job, i64 chunk, u32 i, u32 j) {
    i64 at = place_of(job, chunk, i, j);
    return at < 0 ? 0.0f : read<float>(job.memory, job.element, at);
}

__device__ void store_element(const Job& job, i64 chunk, u32 i, u32 j, float value) {
    i64 at = place_of(job, chunk, i, j);
    if (at >= 0) write(job.memory, job.element, at, value);
}

// --- transform -------------------------------------------------------------------------------------------------------

__device__ void do_step(const Step& step, float* x, float* y) {
    float a = *x, b = *y;
    if (step.code == BUTTERFLY) {
        *x = a + b;
        *y = a - b;
    } else if (step.code == MIX) {
        *x = step.c0 * a + step.c1 * b;
        *y = step.c2 * a + step.c3 * b;
    } else if (step.code == ADD_SCALED) {
        *x = a + step.c0 * b;
    } else {
        *x = step.c0 * a;
    }
}

// Do a program on rows of so many lanes; input k of lane l is value(k, l). Threads that load are neighbours by lane, or
// else by input. Steps of one level share the threads; neighbours have neighbouring lanes, so their accesses to shared
// memory do not collide.
template <class Value>
__device__ void apply_to(const Block& block, const Transform& transform, float* rows, u32 length, u32 lanes, u32 pitch,
                         bool by_lane, Value value) {
    if (transform.height != length) {  // the program works in more rows than it is given
        for (u32 at = block.thread; at < transform.height * pitch; at += block.threads) rows[at] = 0.0f;
        __syncthreads();
    }
    for (u32 e = block.thread; e < lanes * length; e += block.threads) {
        u32 k = by_lane ? e / lanes : e % length, lane = by_lane ? e % lanes : e / length;
        rows[transform.inputs[k] * pitch + lane] = value(k, lane);
    }
    __syncthreads();
    u32 across = min(lanes, block.threads), deep = block.threads / across;
    u32 begin = block.thread % across, depth = block.thread / across;
    for (u32 level = 0u; level < transform.levels; level++) {
        int last = transform.bounds[level + 1u];
        for (int number = transform.bounds[level] + depth; depth < deep && number < last; number += deep) {
            const Step step = transform.steps[number];
            for (u32 lane = begin; lane < lanes; lane += across) {
                do_step(step, rows + step.i * pitch + lane, rows + step.j * pitch + lane);
            }
        }
        __syncthreads();
    }
}

// Fill `turned` with the unscaled coefficients of the group's chunks: one chunk of many rows, or many of one row.
__device__ void transform_chunks(Block& block, const Job& job, i64 first, u32 here) {
    u32 height = (u32)job.chunk_rows, width = (u32)job.chunk_cols, down = (u32)job.pitch_down;
    if (height > 1u) {
        apply_to(block, job.down, block.row, height, width, down, true,
                 [&](u32 i, u32 j) { return load_element(job, first, i, j); });
    }
    u32 lanes = height > 1u ? height : here;
    apply_to(block, job.along, block.turned, width, lanes, (u32)job.pitch_along, false, [&](u32 j, u32 i) {
        return height > 1u ? block.row[job.down.outputs[i] * down + j] : load_element(job, first + i, 0u, j);
    });
}

// Write the elements whose coefficients are in `row`, transformed back.
__device__ void restore_chunks(Block& block, const Job& job, i64 first, u32 here) {
    u32 height = (u32)job.chunk_rows, width = (u32)job.chunk_cols;
    u32 down = (u32)job.pitch_down, along = (u32)job.pitch_along, lanes = height > 1u ? height : here;
    u32 pitch = height > 1u ? height : (u32)job.pitch;
    apply_to(block, job.along, block.turned, width, lanes, along, true,
             [&](u32 j, u32 i) { return block.row[j * pitch + i]; });
    if (height > 1u) {
        apply_to(block, job.down, block.row, height, width, down, true,
                 [&](u32 i, u32 j) { return block.turned[job.along.outputs[j] * along + i]; });
    }
    for (u32 e = block.thread; e < lanes * width; e += block.threads) {
        u32 i = e / width, j = e % width;
        if (height > 1u) {
            store_element(job, first, i, j, block.row[job.down.outputs[i] * down + j] * job.factor);
        } else {
            store_element(job, first + i, 0u, j, block.turned[job.along.outputs[j] * along + i] * job.factor);
        }
    }
}

// Return coefficient k of a chunk before it is scaled; a transformed chunk is kept turned.
__device__ float coefficient(const Block& block, const Job& job, i64 chunk, u32 g, u32 k) {
    u32 height = (u32)job.chunk_rows, width = (u32)job.chunk_cols;
    if (!job.transformed) return load_element(job, chunk, k / width, k % width);
    return block.turned[job.along.outputs[k / height] * (u32)job.pitch_along + (height == 1u ? g : k % height)];
}

// Fill `row` with what the chunks hold: decay * state + factor * coefficients.
__device__ void accumulate(Block& block, const Job& job, i64 first, u32 here) {
    if (job.transformed) transform_chunks(block, job, first, here);
    by_coefficient(block, here, [&](u32 g, u32 k, float& cell) {
        float value = coefficient(block, job, first + g, g, k) * job.factor;
        cell = job.state ? job.decay * job.state[(first + g) * job.chunk_numel + k] + value : value;
    });
    __syncthreads();
}

// --- selection -------------------------------------------------------------------------------------------------------

__device__ bool is_dense(const Job& job) { return job.selection != THRESHOLD && job.k == job.chunk_numel; }

__device__ u32 count_reaching(Block& block, u32 bound) {
    u32 mine = 0u;
    for (u32 i = block.rank; i < block.length; i += block.size) mine += block.magnitude(i) >= bound;
    return block.sum(mine);
}

__device__ u32 largest_magnitude(Block& block) {
    u32 mine = 0u;
    for (u32 i = block.rank; i < block.length; i += block.size) mine = max(mine, block.magnitude(i));
    return block.largest(mine);
}

// Return the index behind the last of so many ties: magnitudes in [low, high), lowest index first.
__device__ u32 end_of_ties(Block& block, u32 low, u32 high, u32 ties) {
    clear_marks(block, block.length);
    for (u32 i = block.rank; i < block.length; i += block.size) {
        u32 magnitude = block.magnitude(i);
        if (magnitude >= low && magnitude < high) mark(block, i);
    }
    rank_marks(block, block.length);
    u32 mine = 0u;
    visit_marks(block, block.length, [&](u32 i, u32 entry) {
        if (entry + 1u == ties) mine = i + 1u;
    });
    return block.largest(mine);
}

// Return where the bin of these bits ends. The last one's end, 0x80000000, is more than any magnitude, NaN's too.
__device__ u32 bin_end(u32 bits) { return ((bits >> BIN_SHIFT) + 1u) << BIN_SHIFT; }

// Mark `wanted` of so many that reach `low`: all that reach `high`, and of those between the ones of lowest index.
__device__ void mark_reaching(Block& block, u32 low, u32 high, u32 reaching, u32 wanted) {
    u32 limit = block.length;
    if (reaching > wanted) limit = end_of_ties(block, low, high, wanted - count_reaching(block, high));
    clear_marks(block, block.length);
    for (u32 i = block.rank; i < block.length; i += block.size) {
        u32 magnitude = block.magnitude(i);
        if (magnitude >= high || (magnitude >= low && i < limit)) mark(block, i);
    }
}

__device__ void mark_top_k(Block& block, u32 k) {
    u32 low = 0u, high = largest_magnitude(block) + 1u, reaching = block.length;
    while (high - low > 1u && reaching > k) {  // so many reach low, fewer than k reach high
        u32 middle = low + ((high - low) >> 1), found = count_reaching(block, middle);
        if (found >= k) {
            low = middle;
            reaching = found;
        } else {
            high = middle;
        }
    }
    mark_reaching(block, low, high, reaching, k);
}

__device__ u32 shuffled(u32 place, u32 length, u32 key) {
    u32 width = 1u;
    while ((1u << width) < length) width++;
    u32 mask = (1u << width) - 1u, half = (width + 1u) >> 1;
    do {
        for (u32 turn = 0u; turn < 4u; turn++) {
            place = (place + mix32(key + turn)) & mask;
            place = (place * 0x2C9277B5u) & mask;
            place ^= place >> half;
        }
    } while (place >= length);
    return place;
}

// Mark what every rank derives alike from the step.
__device__ void mark_shared(Block& block, const Job& job, i64 chunk) {
    u32 length = block.length, key = mix32((u32)job.key + (u32)chunk * GOLDEN);
    clear_marks(block, length);
    for (u32 entry = block.rank; entry < job.k; entry += block.size) {
        if (job.selection == RANDOM_K) {
            mark(block, shuffled((u32)((job.start + entry) % length), length, key));
        } else {
            mark(block, (u32)((entry * job.chunk_numel / job.k + job.start) % length));
        }
    }
}

// Mark and rank what is sent of a chunk; return how many.
__device__ u32 select(Block& block, const Job& job, i64 chunk) {
    if (is_dense(job)) return block.length;
    if (job.selection == TOP_K) {
        mark_top_k(block, (u32)job.k);
    } else if (job.selection == THRESHOLD) {
        u32 low = (u32)job.tau_bits, reaching = count_reaching(block, low);
        mark_reaching(block, low, bin_end(low), reaching, (u32)job.counts[chunk]);
    } else {
        mark_shared(block, job, chunk);
    }
    return rank_marks(block, block.length);
}

// Call visit(index, entry) for everything selected.
template <class Visit>
__device__ void visit_selected(Block& block, const Job& job, Visit visit) {
    if (!is_dense(job)) {
        visit_marks(block, block.length, visit);
        return;
    }
    for (u32 i = block.rank; i < block.length; i += block.size) visit(i, i);
}

// --- values ----------------------------------------------------------------------------------------------------------

struct Scales {
    float scale, step;
};

__device__ u32 quantise(i64 values, float value, Scales scales) {
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

__device__ float dequantise(i64 values, u32 code, Scales scales) {
    if (values == FP32) return __uint_as_float(code);
    if (values == BF16) return bf16_value(code);
    if (values == FP16) return fp16_value(code);
    if (values == INT8) return (float)((int)(code ^ 0x80u) - 0x80) * scales.scale;
    float magnitude = scales.scale;
    if (values == SIGN2) magnitude = magnitude + (float)(code >> 1) * scales.step;
    return code & 1u ? -magnitude : magnitude;
}

// Return the mean magnitude of what is sent: entry e into lane e % 32, then lanes in halves, as every kernel set does.
__device__ float mean_magnitude(Block& block, const Job& job, u32 count) {
    visit_selected(block, job, [&](u32 i, u32 entry) { block.spare(entry) = fabsf(block.cell(i)); });
    block.sync();
    for (u32 lane = block.rank; lane < SUM_LANES; lane += block.size) {
        float sum = 0.0f;
        for (u32 entry = lane; entry < count; entry += SUM_LANES) sum = sum + block.spare(entry);
        block.spare(lane) = sum;
    }
    block.sync();
    if (block.rank == 0u) {
        for (u32 half = SUM_LANES >> 1; half; half >>= 1) {
            for (u32 lane = 0u; lane < half; lane++) {
                block.spare(lane) = block.spare(lane) + block.spare(lane + half);
            }
        }
    }
    block.sync();
    return block.spare(0u) / (float)(count ? count : 1u);
}

struct Extremes {
    u32 least, largest;
};

__device__ Extremes extremes_of(Block& block, const Job& job) {
    u32 largest = 0u, below = 0u;
    visit_selected(block, job, [&](u32 i, u32) {
        largest = max(largest, block.magnitude(i));
        below = max(below, MAGNITUDE - block.magnitude(i));
    });
    largest = block.largest(largest);
    return {MAGNITUDE - block.largest(below), largest};
}

// Write the scales of a chunk; return them as the receiver will read them.
__device__ Scales put_scales(Block& block, const Job& job, u32 count, i64 chunk) {
    u32 first = 0u, second = 0u;
    if (job.values == INT8) {
        first = bf16_up(__uint_as_float(extremes_of(block, job).largest) / 127.0f);
    } else if (job.values == SIGN) {
        first = saturated_bf16(mean_magnitude(block, job, count));
    } else if (job.values == SIGN2 && count) {
        Extremes extremes = extremes_of(block, job);
        first = extremes.least >> 16;
        second = bf16_up((__uint_as_float(extremes.largest) - bf16_value(first)) / 3.0f);
    }
    if (block.rank == 0u && job.scales) {
        i64 position = 32 * job.own.scales + chunk * job.scales * 16;
        put(job.words, position, first, 16u);
        if (job.scales == 2) put(job.words, position + 16, second, 16u);
    }
    return {bf16_value(first), bf16_value(second)};
}

__device__ Scales get_scales(const Job& job, const Section& section, i64 chunk) {
    if (!job.scales) return {0.0f, 0.0f};
    i64 position = 32 * section.scales + chunk * job.scales * 16;
    float step = job.scales == 2 ? bf16_value(get(job.words, position + 16, 16u)) : 0.0f;
    return {bf16_value(get(job.words, position, 16u)), step};
}

// --- entries of a payload --------------------------------------------------------------------------------------------

struct Entries {
    u32 count;
    i64 index_bit, value_bit;
};

__device__ Entries entries_of(const Job& job, const Section& section, i64 chunk) {
    i64 before = section.before ? section.before[chunk] : chunk * job.k;
    i64 after = section.before ? section.before[chunk + 1] : before + job.k;
    i64 index_bit = 32 * section.indices + before * section.entry_bits + chunk * section.chunk_bits;
    i64 value_bit = 32 * section.values + before * job.value_bits + chunk * section.value_padding;
    return {(u32)(after - before), index_bit, value_bit};
}

__device__ void put_index(const Job& job, Entries at, u32 count, u32 i, u32 entry) {
    u32 low = (u32)job.own.low_bits, moved = job.own.code == ELIAS_FANO ? entry : 0u;
    if (job.own.code == PACKED) {
        put(job.words, at.index_bit + entry * job.own.entry_bits, i, (u32)job.own.entry_bits);
    } else if (job.own.code != NO_INDEX) {  // a bitmap has no low bits
        put(job.words, at.index_bit + (i64)entry * low, i & ((1u << low) - 1u), low);
        put(job.words, at.index_bit + (i64)count * low + (i >> low) + moved, 1u, 1u);
    }
}

__device__ u32 read_marks(Block& block, const u32* words, i64 position, u32 length) {
    for (u32 word = block.rank; word < (length + 31u) >> 5; word += block.size) {
        block.mark_word(word) = get(words, position + 32 * (i64)word, min(32u, length - 32u * word));
    }
    return rank_marks(block, length);
}

// Call visit(index, entry) for a chunk's entries; return how many there are: the count, unless it is a lie.
template <class Visit>
__device__ u32 visit_entries(Block& block, const Job& job, const Section& section, Entries at, Visit visit) {
    u32 length = block.length, low = (u32)section.low_bits;
    if (section.code == NO_INDEX) {
        visit_selected(block, job, visit);
        return at.count;
    }
    if (section.code == PACKED) {
        for (u32 entry = block.rank; entry < at.count; entry += block.size) {
            visit(get(job.words, at.index_bit + entry * section.entry_bits, (u32)section.entry_bits), entry);
        }
        return at.count;
    }
    bool is_bitmap = section.code == BITMAP;
    u32 high_bits = is_bitmap ? length : at.count + ((length - 1u) >> low);
    u32 found = read_marks(block, job.words, at.index_bit + (i64)at.count * low, high_bits);
    if (found == at.count) {
        visit_marks(block, high_bits, [&](u32 bit, u32 entry) {
            u32 high = is_bitmap ? bit : bit - entry;
            visit((high << low) | get(job.words, at.index_bit + (i64)entry * low, low), entry);
        });
    }
    return found;
}

// --- encode ----------------------------------------------------------------------------------------------------------

// Write what is sent of a chunk, and leave in `row` what is not.
__device__ void send_chunk(Block& block, const Job& job, i64 chunk) {
    u32 count = select(block, job, chunk), broken = 0u;
    Entries at = entries_of(job, job.own, chunk);
    Scales scales = put_scales(block, job, count, chunk);
    // A variable payload begins with its counts.
    if (job.selection == THRESHOLD && block.rank == 0u) {
        put(job.words, chunk * job.count_bits, count, (u32)job.count_bits);
    }
    visit_selected(block, job, [&](u32 i, u32 entry) {
        float value = block.cell(i);
        u32 code = quantise(job.values, value, scales);
        put_index(job, at, count, i, entry);
        put(job.words, at.value_bit + entry * job.value_bits, code, (u32)job.value_bits);
        float unsent = value - dequantise(job.values, code, scales);
        block.cell(i) = job.stays == 0.0f ? unsent : unsent + job.stays * (value - unsent);
        broken |= magnitude_of(value) >= INFINITE;
    });
    if (broken) atomicMax(job.answer, (u64)1);
}

extern "C" __global__ void RESIDENT encode_chunks(const Job job) {
    by_group(job, [&](Block& block, i64 first, u32 here) {
        accumulate(block, job, first, here);
        by_team(block, first, here, [&](i64 chunk) { send_chunk(block, job, chunk); });
        if (!job.next_state) return;
        by_coefficient(block, here, [&](u32 g, u32 k, float& cell) {
            job.next_state[(first + g) * job.chunk_numel + k] = cell;
        });
    });
}

// Count what reaches the threshold in each chunk.
extern "C" __global__ void count_chunks(const Job job) {
    by_group(job, [&](Block& block, i64 first, u32 here) {
        accumulate(block, job, first, here);
        by_team(block, first, here, [&](i64 chunk) {
            u32 count = count_reaching(block, (u32)job.tau_bits);
            if (block.rank == 0u) job.counts[chunk] = count;
        });
    });
}

// Count magnitudes above the threshold's bin, by the upper half of their bits. Most are below, and nobody asks for them.
extern "C" __global__ void histogram_of_chunks(const Job job) {
    by_group(job, [&](Block& block, i64 first, u32 here) {
        accumulate(block, job, first, here);
        by_coefficient(block, here, [&](u32, u32, float& cell) {
            u32 bin = magnitude_of(cell) >> BIN_SHIFT;
            if (bin > job.tau_bits >> BIN_SHIFT) atomicAdd((u64*)job.counts + bin, (u64)1);
        });
    });
}

// --- decode ----------------------------------------------------------------------------------------------------------

// Add a chunk's payloads in the order given, and divide. Indices are unique within a payload, so no two threads add to
// the same coefficient before they have met again.
__device__ void add_payloads(Block& block, const Job& job, i64 chunk) {
    for (u32 i = block.rank; i < block.length; i += block.size) {
        block.cell(i) = 0.0f;
        if (!job.divisor) block.spare(i) = 0.0f;  // how many gave it
    }
    if (job.sections[0].code == NO_INDEX) select(block, job, chunk);
    block.sync();
    for (i64 sender = 0; sender < job.senders; sender++) {
        const Section section = job.sections[sender];
        Entries at = entries_of(job, section, chunk);
        Scales scales = get_scales(job, section, chunk);
        visit_entries(block, job, section, at, [&](u32 i, u32 entry) {
            u32 code = get(job.words, at.value_bit + entry * job.value_bits, (u32)job.value_bits);
            block.cell(i) = block.cell(i) + dequantise(job.values, code, scales);
            if (!job.divisor) block.spare(i) = block.spare(i) + 1.0f;
        });
        block.sync();
    }
    for (u32 i = block.rank; i < block.length; i += block.size) {
        float divisor = job.divisor ? (float)job.divisor : fmaxf(block.spare(i), 1.0f);
        block.cell(i) = block.cell(i) / divisor;
    }
}

extern "C" __global__ void RESIDENT decode_chunks(const Job job) {
    by_group(job, [&](Block& block, i64 first, u32 here) {
        by_team(block, first, here, [&](i64 chunk) { add_payloads(block, job, chunk); });
        if (job.transformed) {
            restore_chunks(block, job, first, here);
            return;
        }
        u32 width = (u32)job.chunk_cols;
        by_coefficient(block, here, [&](u32 g, u32 k, float& cell) {
            store_element(job, first + g, k / width, k % width, cell * job.factor);
        });
    });
}

// --- verify ----------------------------------------------------------------------------------------------------------

// Return the least problem of a chunk that this thread of its team finds.
__device__ u32 problem_of(Block& block, const Job& job, i64 chunk) {
    Entries at = entries_of(job, job.own, chunk);
    if (job.own.code != NO_INDEX) {
        u32 found = visit_entries(block, job, job.own, at,
                                  [&](u32 i, u32 entry) { block.cell(entry) = __uint_as_float(i); });
        if (found != at.count) return INDEX_PROBLEM;
        block.sync();
        for (u32 entry = block.rank; entry < at.count; entry += block.size) {
            u32 i = __float_as_uint(block.cell(entry));
            if (i >= block.length || (entry && i <= __float_as_uint(block.cell(entry - 1u)))) return INDEX_PROBLEM;
        }
    }
    for (u32 i = block.rank; i < job.scales; i += block.size) {
        i64 position = 32 * job.own.scales + (chunk * job.scales + i) * 16;
        if (get(job.words, position, 16u) >= 0x7F80u) return SCALE_PROBLEM;
    }
    u32 infinite = job.values == FP32 ? INFINITE : job.values == BF16 ? 0x7F80u : 0x7C00u;
    for (u32 entry = block.rank; job.values <= FP16 && entry < at.count; entry += block.size) {
        u32 code = get(job.words, at.value_bit + entry * job.value_bits, (u32)job.value_bits);
        if ((code & infinite) == infinite) return VALUE_PROBLEM;
    }
    return NO_PROBLEM;
}

// Leave in the answer the least problem of all chunks: the same one, in whatever order they are found.
extern "C" __global__ void find_problems(const Job job) {
    by_group(job, [&](Block& block, i64 first, u32 here) {
        by_team(block, first, here, [&](i64 chunk) {
            u32 problem = problem_of(block, job, chunk);
            if (problem != NO_PROBLEM) atomicMin(job.answer, (u64)problem);
        });
    });
}

// --- one thread an element -------------------------------------------------------------------------------------------

__device__ i64 first_item() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

__device__ i64 items_apart() { return (i64)gridDim.x * blockDim.x; }

// Fill the counts of a payload that begins at word `first`; leave 1 in the answer if one exceeds a chunk.
extern "C" __global__ void read_counts(const Job job) {
    for (i64 chunk = first_item(); chunk < job.chunks; chunk += items_apart()) {
        u32 count = get(job.words, 32 * job.first + chunk * job.count_bits, (u32)job.count_bits);
        job.counts[chunk] = count;
        if (count > job.chunk_numel) atomicMax(job.answer, (u64)1);
    }
}

// Add up words scattered with their places, modulo 2**32. Whole numbers add up to the same in any order.
extern "C" __global__ void add_checksum(const Job job) {
    if (threadIdx.x == 0u) shared_words[0] = 0u;
    __syncthreads();
    u32 mine = 0u;
    for (i64 at = first_item(); at < job.numel; at += items_apart()) {
        if (at != CHECKSUM_WORD) mine += mix32(job.words[at] ^ ((u32)at * GOLDEN));
    }
    atomicAdd(shared_words, mine);
    __syncthreads();
    if (threadIdx.x == 0u) atomicAdd(job.answer, (u64)shared_words[0]);
}

// --- mixing ----------------------------------------------------------------------------------------------------------

// Mix one element; return how far it moved, squared.
template <class Number>
__device__ double mix_element(const Job& job, i64 at) {
    Number total = 0, before = read<Number>(job.memory, job.element, at);
    for (i64 number = 0; number < job.term_count; number++) {
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
extern "C" __global__ void mix(const Job job) {
    double far = 0.0;
    for (i64 at = first_item(); at < job.numel; at += items_apart()) {
        far += job.element == DOUBLE ? mix_element<double>(job, at) : mix_element<float>(job, at);
    }
    add_up(far, job.distances + blockIdx.x);
}
