// What a launch is told: a bucket's tensors, where their payloads are, and which block works on which chunks.
//
// tables.py mirrors the structures, field by field.

enum Operation { BUTTERFLY, ROTATE, SCALE, ADD_SCALED };
enum Epilogue { STORE, SIGN_STEP, PLAIN_STEP };
enum Problem {  // as flexcomm/kernels/base.py has them
    NO_PROBLEM,
    NONFINITE_PROBLEM,
    STATE_PROBLEM,
    HEADER_PROBLEM,
    COUNTS_PROBLEM,
    LENGTH_PROBLEM,
    ENTRIES_PROBLEM,
    INDEX_PROBLEM,
    SCALE_PROBLEM,
    VALUE_PROBLEM
};

const u32 HEADER_WORDS = 16u;
const u32 FLAGS_WORD = 1u;
const u32 ENTRIES_WORD = 8u;  // and the next
const u32 NBYTES_WORD = 10u;  // and the next
const u32 CHECKSUM_WORD = 12u;
const u32 NONFINITE_FLAG = 1u << 16;
const u64 NOTHING_FOUND = ~(u64)0;

struct alignas(8) Step {
    int code, i, j, spare;
    float c0, c1;
};

// A program of flexcomm/kernels/butterflies.py, its steps sorted into levels that do not depend on one another.
struct Transform {
    i64 height, levels;
    const int* inputs;
    const int* outputs;
    const int* bounds;
    const Step* steps;
};

// Where one payload's sections begin, in words, how its indices are written, and how many entries precede each chunk;
// without that list, `k` in every chunk.
struct Section {
    i64 indices, scales, values;
    const u32* before;
    u32 code, low_bits, entry_bits, chunk_bits, value_padding, spare;
};

// A tensor's plan, and where its payload is in a buffer; a block's areas of shared memory, in words, see blocks.cuh.
struct Tensor {
    Section section;
    i64 rows, cols;
    u32 chunk_rows, chunk_cols, grid_cols, chunk_numel, chunks;
    u32 transformed, selection, k, values, value_bits, scales, tau_bits, variable, count_bits;
    u32 is_tiled, unit, first_chunk, first_counted, number, nwords, variable_length;  // first: of all
    // unit: the chunks of a block; of a tile, so many share no word with the next ones
    u32 group, pitch, pitch_down, pitch_along, turned_at, marks_at, ranks_at, block_words, stride;
    float scale;
    Transform down, along, inverse_down, inverse_along;
    u32* workspace;
};

// What changes from call to call: addresses of a tensor and its states, its dtype, and its sample key.
struct Operand {
    void* memory;
    const float* state;
    float* next_state;
    u32 element, key, start;
    float factor;
};

// What a block begins with: a chunk of a tensor, and the row and the column of its first element.
struct Place {
    u32 tensor, chunk, row, col;
};

// What the blocks of a launch add up; the last one leaves it as it found it.
struct Tally {
    u64 problem;  // the least that was found
    u32 checksum, blocks;
};

struct Job {
    const Place* places;
    const Tensor* tensors;
    const Operand* operands;
    const Section* sections;  // of every sender and tensor, where they depend on the data; else none
    const i64* starts;        // where each sender's buffer begins, in words, and how many it has
    u32* words;
    u64* status;
    Tally* tally;  // one for each sender
    u8* refused;   // by chunk: the last encode did not update its state
    u64* open;     // by word: bits that some chunks have put there, and above, how many; zero when all have
    u32* totals;   // where the data says how many: entries, words, the threshold of each tensor, whether it was raised
    u32* counts;   // of chunks: how many reach the threshold, and then, how many are above its bin
    u32* bins;
    u32* before;
    Section* placed;
    u32 tensor_count, senders, divisor, blocks;  // without a divisor, averages are over contributors
    u32 nwords, used_words, share, place_count;  // share: the words of a block
    float decay, stays;
    float reciprocal;
    u32 is_exact;  // the reciprocal of the divisor
    u32 is_variable_length, variables, counted, is_recount;
    double lr, keep;
    u32 header[HEADER_WORDS];
};

__device__ u64 problem_at(u32 problem, u32 tensor) { return ((u64)problem << 32) | tensor; }

__device__ u64 status_word(u32 sender, u32 tensor, u32 problem) {
    return ((u64)sender << 40) | ((u64)tensor << 8) | problem;
}

// Return whether this is the last block of the launch to come here; then all that the others wrote can be read.
__device__ bool is_last(const Job& job, u32 lane) {
    u32 before = 0u;
    __threadfence();
    if (lane == 0u) before = atomicInc(&job.tally->blocks, gridDim.x - 1u);  // the last one makes it 0 again
    before = __shfl_sync(ALL, before, 0);
    __threadfence();
    return before + 1u == gridDim.x;
}

// Add a warp's part of the checksum, one number a lane; the last block of the launch writes the header.
__device__ void close_buffer(const Job& job, u32 sum, u32 lane) {
    sum = add_lanes(sum);
    if (lane == 0u) atomicAdd(&job.tally->checksum, sum);
    if (!is_last(job, lane)) return;
    u64 problem = atomicMin(&job.tally->problem, NOTHING_FOUND);
    bool is_refused = problem != NOTHING_FOUND;
    u32 used = job.used_words, nwords = job.nwords, word = job.header[lane & 15u];
    sum = lane == 0u ? atomicAdd(&job.tally->checksum, 0u) : 0u;
    if (job.is_variable_length) {
        used = job.totals[1];
        if (is_refused) {  // nothing but the header
            used = HEADER_WORDS;
            sum = 0u;
        }
        nwords = (used + 3u) & ~3u;
        if (lane == NBYTES_WORD) word = 4u * (nwords - HEADER_WORDS);
        if (lane == NBYTES_WORD + 1u) word = (nwords - HEADER_WORDS) >> 30;
    }
    if (job.totals && lane == ENTRIES_WORD) word = job.totals[0];
    if (job.totals && lane == ENTRIES_WORD + 1u) word = 0u;
    if (is_refused && (lane & ~1u) == ENTRIES_WORD) word = 0u;
    if (is_refused && lane == FLAGS_WORD) word |= NONFINITE_FLAG;
    if (used + lane < nwords) {
        job.words[used + lane] = 0u;
        sum += hashed(0u, used + lane);
    }
    if (lane < HEADER_WORDS && lane != CHECKSUM_WORD) {
        job.words[lane] = word;
        sum += hashed(word, lane);
    }
    sum = add_lanes(sum);
    __syncwarp();  // all lanes have read what was found
    if (lane == 0u) {
        job.words[CHECKSUM_WORD] = sum;
        *job.status = is_refused ? status_word(0u, (u32)problem, (u32)(problem >> 32)) : 0u;
        job.tally->problem = NOTHING_FOUND;
        job.tally->checksum = 0u;
    }
}
