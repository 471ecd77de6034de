// Transformed chunks of 64 x 64 of which the largest coefficients are sent: two warps a chunk, a column each thread.
//
// A column lives in 64 registers. The transform goes down the columns, turns the chunk through shared memory, and goes
// along the rows, in straight lines of code: dct64() and idct64() are generated from flexcomm/kernels/butterflies.py,
// with OUT[k] the register of coefficient k. Then thread `krow` holds the coefficients `kcol * 64 + krow`.
//
// [Note: the tile] Rows of the tile are 68 words apart: columns are stored, and rows read 16 bytes at a time, without
// conflicts of banks. The four words behind each row hold what else a block needs, so that nine blocks fit the shared
// memory of a multiprocessor. Once a chunk is in registers, the tile's rows are free, too: see the offsets below.

const u32 SIDE = 64u;
const u32 PITCH = 68u;
const u32 MAXIMA = 4u;                 // of a thread's coefficients, by column modulo this
const u32 LIST_AT = 32u * PITCH;       // indices of candidates, and then of what is sent
const u32 IMAGE_AT = LIST_AT + 1024u;  // of the chunk's payload
const u32 EXTREME_AT = 4096u;  // whether a sum is
const u32 PLACES_AT = 4224u;   // of an index code's bits
const u32 FLOOR_AT = 63u * PITCH + SIDE;
const u32 LARGEST_AT = FLOOR_AT + 1u;  // of what each warp has
const u32 MOST_CANDIDATES = 1024u;
const u32 SLACK = 4u;

struct alignas(16) Quad {
    u32 x, y, z, w;
};

// Return where word `w` of the bitmap of candidates is: behind the first rows.
__device__ u32 bitmap_word(u32 w) { return (w >> 2) * PITCH + SIDE + (w & 3u); }

__device__ float* tile_floats() { return (float*)shared_words; }

// --- from memory to registers ----------------------------------------------------------------------------------------

template <int ELEMENT>
__device__ float read_element(const char* at) {
    if (ELEMENT == FLOAT) return *(const float*)at;
    if (ELEMENT == DOUBLE) return (float)*(const double*)at;
    return half_value(ELEMENT, *(const u16*)at);
}

// Fill the registers with a whole column.
template <int ELEMENT>
__device__ void load_column(float (&v)[64], const char* column, u64 pitch) {
    GLOBAL(column);
    UNROLL for (u32 i = 0u; i < SIDE; i++) v[i] = read_element<ELEMENT>(column + i * pitch);
}

// Fill the registers with a column of so many rows, zeros behind them; return whether all elements are below the bound.
// It goes by way of the thread's own column of the tile: registers are no array, and cannot be looped over.
__device__ bool load_some(float (&v)[64], const void* memory, u32 element, i64 at, i64 cols, u32 rows) {
    float* own = tile_floats() + threadIdx.x;
    bool fits = true;
    for (u32 i = 0u; i < SIDE; i++) {
        own[i * PITCH] = i < rows ? read<float>(memory, element, at + i * cols) : 0.0f;
        // What is below the bound as a double may be rounded to it.
        if (i < rows && element == DOUBLE) {
            fits = fits && fabs(((const double*)memory)[at + i * cols]) < (double)__uint_as_float(TOO_LARGE);
        }
    }
    UNROLL for (u32 i = 0u; i < SIDE; i++) v[i] = own[i * PITCH];
    return fits;
}

// Fill the registers with a column; return NaN if an element cannot be sent, else 0.
__device__ float load_any_column(float (&v)[64], const Tensor& t, const Operand& at, u32 row, u32 col) {
    const u32 element = at.element, left = (u32)t.rows - row;
    const u32 rows = col >= (u32)t.cols ? 0u : left < SIDE ? left : SIDE;
    const i64 first = (i64)row * t.cols + col;
    const u64 nbytes = element_nbytes(element), pitch = t.cols * nbytes;
    const char* column = (const char*)at.memory + first * nbytes;
    bool fits = true;
    if (rows == SIDE && element == FLOAT) {
        load_column<FLOAT>(v, column, pitch);
    } else if (rows == SIDE && element == BFLOAT16) {
        load_column<BFLOAT16>(v, column, pitch);
    } else if (rows == SIDE && element == HALF) {
        load_column<HALF>(v, column, pitch);
    } else {
        fits = load_some(v, at.memory, element, first, t.cols, rows);
    }
    float largest = 0.0f;
    UNROLL for (u32 i = 0u; i < SIDE; i++) largest = max_nan(largest, fabsf(v[i]));
    if (element != DOUBLE) fits = largest < __uint_as_float(TOO_LARGE);
    return fits ? 0.0f : __uint_as_float(ALL);
}

// --- selection -------------------------------------------------------------------------------------------------------

// Return a bound, as bits, that at least `k` coefficients reach, and few more if maxima of threads are much alike: the
// k-th largest of all maxima, or a little less. One warp does.
__device__ u32 find_floor(const u32* tile, u32 k, u32 lane, u32 largest) {
    if (k > SIDE * MAXIMA) return 0u;
    float maxima[2u * MAXIMA];
    UNROLL for (u32 half = 0u; half < 2u; half++) {
        Quad own = *(const Quad*)(tile + (lane + 32u * half) * PITCH);
        maxima[4u * half] = __uint_as_float(own.x);
        maxima[4u * half + 1u] = __uint_as_float(own.y);
        maxima[4u * half + 2u] = __uint_as_float(own.z);
        maxima[4u * half + 3u] = __uint_as_float(own.w);
    }
    u32 low = 0u, high = largest + 1u;
    // Most often so many are within a factor of 64 of the largest.
    u32 middle = largest > 6u << 23 ? largest - (6u << 23) : high >> 1;
    while (high - low > 1u) {
        u32 mine = 0u;
        UNROLL for (u32 i = 0u; i < 2u * MAXIMA; i++) add_if_reaching(mine, maxima[i], __uint_as_float(middle));
        u32 reaching = add_lanes(mine);
        if (reaching >= k) {
            low = middle;
            if (reaching <= k + SLACK) break;
        } else {
            high = middle;
        }
        middle = low + ((high - low) >> 1);
    }
    return low;
}

// Write the bitmap of all coefficients that reach a bound, in the order of indices.
__device__ void scan(const float (&v)[64], u32 low, u32* tile, u32 warp, u32 lane) {
    float bound = __uint_as_float(low);
    UNROLL for (u32 j = 0u; j < SIDE; j++) {
        u32 word = __ballot_sync(ALL, fabsf(v[OUT[j]]) >= bound);
        if (lane == 0u) tile[bitmap_word(2u * j) + warp] = word;
    }
}

// Four words of the bitmap, in the order of indices.
struct Bitmap {
    u32 words[4];

    __device__ u32 count() const { return __popc(words[0]) + __popc(words[1]) + __popc(words[2]) + __popc(words[3]); }
};

__device__ Bitmap read_bitmap(const u32* tile, u32 lane) {
    Quad own = *(const Quad*)(tile + bitmap_word(4u * lane));
    return {{own.x, own.y, own.z, own.w}};
}

__device__ u32 before_lane(u32 mine, u32 lane) {
    u32 sum = mine;
    UNROLL for (u32 distance = 1u; distance < 32u; distance <<= 1) {
        u32 other = __shfl_up_sync(ALL, sum, distance);
        if (lane >= distance) sum += other;
    }
    return sum - mine;
}

// Keep so many of the lowest indices.
__device__ void cut_bitmap(Bitmap& bitmap, u32 room, u32 lane) {
    u32 skipped = before_lane(bitmap.count(), lane);
    room = room > skipped ? room - skipped : 0u;
    UNROLL for (u32 i = 0u; i < 4u; i++) {
        u32 word = bitmap.words[i];
        for (; __popc(word) > room; word &= ~(0x80000000u >> __clz(word))) {
        }
        room -= __popc(word);
        bitmap.words[i] = word;
    }
}

// Narrow the candidates down, among all coefficients, to as many as fit their list, or exactly to `k`. All reach `*low`,
// of which there are `total`; fewer than k reach `*high`. Leaves the bitmap of candidates; returns how many there are.
__device__ u32 narrow(const float (&v)[64], u32 k, u32 most, u32* low, u32* high, u32 total, Bitmap& bitmap, u32* tile,
                      u32 warp, u32 lane) {
    // The first bound decides on ties, and on zeros.
    u32 turn = 0u, middle = *low + 1u, above = 0u;
    while (total > most && *high - *low > 1u) {
        float bound = __uint_as_float(middle);
        u32 mine = 0u;
        UNROLL for (u32 i = 0u; i < SIDE; i++) add_if_reaching(mine, fabsf(v[i]), bound);
        mine = add_lanes(mine);
        if (lane == 0u) tile[2u * turn + warp] = mine;
        __syncthreads();
        u32 reaching = tile[2u * turn] + tile[2u * turn + 1u];
        turn ^= 1u;
        if (reaching >= k) {
            *low = middle;
            total = reaching;
        } else {
            *high = middle;
            above = reaching;
        }
        middle = *low + ((*high - *low) >> 1);
    }
    __syncthreads();
    if (total <= most) {
        scan(v, *low, tile, warp, lane);
        __syncthreads();
        bitmap = read_bitmap(tile, lane);
        return total;
    }
    scan(v, *high, tile, warp, lane);
    __syncthreads();
    Bitmap larger = read_bitmap(tile, lane);
    __syncthreads();
    scan(v, *low, tile, warp, lane);
    __syncthreads();
    bitmap = read_bitmap(tile, lane);
    UNROLL for (u32 i = 0u; i < 4u; i++) bitmap.words[i] &= ~larger.words[i];
    cut_bitmap(bitmap, k - above, lane);
    UNROLL for (u32 i = 0u; i < 4u; i++) bitmap.words[i] |= larger.words[i];
    return k;
}

// Fill the list with the indices in the bitmap, in their order.
__device__ void list_candidates(const Bitmap& bitmap, u32* list, u32 lane) {
    u32 entry = before_lane(bitmap.count(), lane);
    UNROLL for (u32 i = 0u; i < 4u; i++) {
        for (u32 word = bitmap.words[i]; word; word &= word - 1u) {
            list[entry++] = (4u * lane + i) * 32u + __ffs(word) - 1u;
        }
    }
    __syncwarp();
}

// Magnitudes of candidates lie beside the bitmap, which the other warp may still read.
__device__ u32& magnitude_slot(u32 entry) { return shared_words[(entry >> 6) * PITCH + (entry & 63u)]; }

// Keep the `k` largest of more candidates, in the order of indices; of equals, the first.
__device__ void choose(u32* list, const float* state, u32 total, u32 k, u32 low, u32 high, u32 lane) {
    for (u32 entry = lane; entry < total; entry += 32u) magnitude_slot(entry) = magnitude_of(state[list[entry]]);
    __syncwarp();
    // Two candidates a lane, as there are most often.
    u32 first = lane < total ? magnitude_slot(lane) : 0u, second = lane + 32u < total ? magnitude_slot(lane + 32u) : 0u;
    u32 reaching = total;
    while (reaching != k && high - low > 1u) {
        u32 middle = low + ((high - low) >> 1);
        u32 found = __popc(__ballot_sync(ALL, first >= middle)) + __popc(__ballot_sync(ALL, second >= middle));
        for (u32 entry = lane + 64u; entry - lane < total; entry += 32u) {
            found += __popc(__ballot_sync(ALL, entry < total && magnitude_slot(entry) >= middle));
        }
        if (found >= k) {
            low = middle;
            reaching = found;
        } else {
            high = middle;
        }
    }
    u32 ties = k, chosen = 0u, below = (1u << lane) - 1u;
    if (reaching != k) {
        for (u32 entry = lane; entry - lane < total; entry += 32u) {
            ties -= __popc(__ballot_sync(ALL, entry < total && magnitude_slot(entry) >= high));
        }
    } else {
        high = low;
    }
    for (u32 entry = lane; entry - lane < total; entry += 32u) {
        u32 index = entry < total ? list[entry] : 0u, magnitude = entry < total ? magnitude_slot(entry) : 0u;
        bool larger = entry < total && magnitude >= high, equal = entry < total && magnitude >= low && !larger;
        u32 equals = __ballot_sync(ALL, equal);
        bool kept = larger || (equal && __popc(equals & below) < ties);
        ties -= min(ties, (u32)__popc(equals));
        u32 all_kept = __ballot_sync(ALL, kept);
        __syncwarp();  // all lanes have read before any writes
        if (kept) list[chosen + __popc(all_kept & below)] = index;
        chosen += __popc(all_kept);
    }
    __syncwarp();
}

// --- payload ---------------------------------------------------------------------------------------------------------

// A chunk's part of a section: its first word, where in that its first bit is, and how many words have bits of it.
struct Part {
    i64 word;
    u32 shift, bits, words;
};

__device__ Part part_of(i64 section, u32 bits, u32 chunk) {
    u64 start = (u64)bits * chunk;
    u32 shift = (u32)start & 31u;
    return {section + (i64)(start >> 5), shift, bits, (shift + bits + 31u) >> 5};
}

// Add a chunk's bits of a word in which other chunks have bits, too. Return whether all are there: then the word is.
__device__ bool complete_word(const Job& job, const Tensor& t, i64 section, const Part& part, u32 number, u32* content) {
    u32 mine = min(part.shift + part.bits - 32u * number, 32u) - (number ? 0u : part.shift);
    i64 at = part.word + number;
    u32 all = (u32)min((i64)part.bits * t.chunks - 32 * (at - section), (i64)32);
    if (mine == all) return true;
    u64 before = atomicAdd(job.open + at, ((u64)mine << 32) | *content);
    if ((u32)(before >> 32) + mine < all) return false;
    *content |= (u32)before;
    atomicExch(job.open + at, (u64)0);
    return true;
}

__device__ Scales scale_of(const Tensor& t, const u32* list, const float* state, u32 lane, u32* codes) {
    *codes = 0u;
    if (!t.scales) return {0.0f, 0.0f};
    u32 largest = 0u, below = 0u;
    float sum = 0.0f;
    for (u32 entry = lane; entry < t.k; entry += 32u) {
        u32 magnitude = magnitude_of(state[list[entry]]);
        sum = sum + __uint_as_float(magnitude);
        largest = max(largest, magnitude);
        below = max(below, MAGNITUDE - magnitude);
    }
    ScaleCodes found = {0u, 0u};
    if (t.values == SIGN) {
        UNROLL for (u32 half = 16u; half; half >>= 1) sum = sum + __shfl_down_sync(ALL, sum, half);
        found.first = saturated_bf16(__shfl_sync(ALL, sum, 0) / (float)t.k);
    } else if (t.values == INT8) {
        found.first = int8_scale(largest_of_lanes(largest));
    } else {
        found = scales_between(MAGNITUDE - largest_of_lanes(below), largest_of_lanes(largest));
    }
    *codes = found.first | (found.second << 16);
    return {bf16_value(found.first), bf16_value(found.second)};
}

// Write a chunk's payload, and take what it holds out of its state; one warp does. Without a list, it is zeros. Returns
// this lane's part of the checksum.
__device__ u32 send_tile(const Job& job, const Tensor& t, u32 chunk, const u32* list, float* state, u32 lane) {
    u32* image = shared_words + IMAGE_AT;
    const Part indices = part_of(t.section.indices, t.k * t.section.entry_bits + t.section.chunk_bits, chunk);
    const Part scales = part_of(t.section.scales, 16u * t.scales, chunk);
    const Part values = part_of(t.section.values, t.k * t.value_bits + t.section.value_padding, chunk);
    u32 scales_at = indices.words, values_at = scales_at + scales.words, total = values_at + values.words;
    for (u32 word = lane; word < total; word += 32u) image[word] = 0u;
    __syncwarp();
    if (list) {
        u32 codes;
        Scales scale = scale_of(t, list, state, lane, &codes);
        if (lane == 0u && t.scales) {
            put(image, 32u * scales_at + scales.shift, codes, 16u);
            if (t.scales == 2u) put(image, 32u * scales_at + scales.shift + 16u, codes >> 16, 16u);
        }
        for (u32 entry = lane; entry < t.k; entry += 32u) {
            u32 index = list[entry];
            float value = state[index];
            u32 code = quantise(t.values, value, scale);
            put_index(image, t.section, indices.shift, t.k, index, entry);
            put(image, 32u * values_at + values.shift + entry * t.value_bits, code, t.value_bits);
            float unsent = value - dequantise(t.values, code, scale);
            state[index] = job.stays == 0.0f ? unsent : unsent + job.stays * (value - unsent);
        }
    }
    __syncwarp();
    u32 sum = 0u;
    for (u32 word = lane; word < total; word += 32u) {
        bool is_scale = word >= scales_at && word < values_at, is_value = word >= values_at;
        u32 number = word - (is_value ? values_at : is_scale ? scales_at : 0u), content = image[word];
        if (t.unit > 1u) {
            const Part part = is_value ? values : is_scale ? scales : indices;
            i64 section = is_value ? t.section.values : is_scale ? t.section.scales : t.section.indices;
            if (!complete_word(job, t, section, part, number, &content)) continue;
        }
        i64 at = (is_value ? values.word : is_scale ? scales.word : indices.word) + number;
        job.words[at] = content;
        sum += hashed(content, (u32)at);
    }
    return sum;
}

// --- encode ----------------------------------------------------------------------------------------------------------

// Encode one chunk; return this thread's part of the checksum. The state is written only if all of it is finite.
__device__ u32 encode_tile(const Job& job, const Tensor& t, const Operand& at, const Place& place) {
    const u32 chunk = place.chunk;
    float* tile = tile_floats();
    const u32 thread = threadIdx.x, lane = thread & 31u, warp = thread >> 5;
    float v[64];
    float unfit = load_any_column(v, t, at, place.row, place.col + thread);
    dct64(v);
    UNROLL for (u32 i = 0u; i < SIDE; i++) tile[i * PITCH + thread] = v[OUT[i]];
    __syncthreads();
    UNROLL for (u32 i = 0u; i < SIDE; i += 4u) {
        Quad four = *(const Quad*)(tile + thread * PITCH + i);
        v[i] = __uint_as_float(four.x);
        v[i + 1u] = __uint_as_float(four.y);
        v[i + 2u] = __uint_as_float(four.z);
        v[i + 3u] = __uint_as_float(four.w);
    }
    dct64(v);
    float top[MAXIMA] = {unfit, unfit, unfit, unfit};
    if (at.state) {
        const float* before = at.state + (i64)chunk * 4096 + thread;
        GLOBAL(before);
        UNROLL for (u32 j = 0u; j < SIDE; j++) {
            float& y = v[OUT[j]];
            y = job.decay * before[j * SIDE] + at.factor * y;
            top[j % MAXIMA] = max_nan(top[j % MAXIMA], fabsf(y));
        }
    } else {
        UNROLL for (u32 j = 0u; j < SIDE; j++) {
            float& y = v[OUT[j]];
            y = at.factor * y;
            top[j % MAXIMA] = max_nan(top[j % MAXIMA], fabsf(y));
        }
    }
    // A thread's row of the tile is its own once it has read it.
    *(Quad*)(tile + thread * PITCH) = {__float_as_uint(top[0]), __float_as_uint(top[1]), __float_as_uint(top[2]),
                                       __float_as_uint(top[3])};
    bool fits = max_nan(max_nan(top[0], top[1]), max_nan(top[2], top[3])) < __uint_as_float(INFINITE);
    if (!fits) {
        atomicMin(&job.tally->problem, problem_at(unfit == 0.0f ? STATE_PROBLEM : NONFINITE_PROBLEM, t.number));
    }
    u32 largest = largest_of_lanes(__float_as_uint(max_nan(max_nan(top[0], top[1]), max_nan(top[2], top[3]))));
    if (lane == 0u) shared_words[LARGEST_AT + warp] = largest;
    __syncthreads();
    largest = max(shared_words[LARGEST_AT], shared_words[LARGEST_AT + 1u]);
    u32* list = nullptr;
    float* state = at.next_state + (i64)chunk * 4096;
    GLOBAL(state);
    if (thread == 0u) job.refused[t.first_chunk + chunk] = largest >= INFINITE;
    if (largest < INFINITE) {
        UNROLL for (u32 j = 0u; j < SIDE; j++) state[j * SIDE + thread] = v[OUT[j]];
        if (!warp) {
            u32 low = find_floor(shared_words, t.k, lane, largest);
            if (lane == 0u) shared_words[FLOOR_AT] = low;
        }
        __syncthreads();
        u32 low = shared_words[FLOOR_AT], high = largest + 1u;
        scan(v, low, shared_words, warp, lane);
        __syncthreads();
        Bitmap bitmap = read_bitmap(shared_words, lane);
        u32 total = add_lanes(bitmap.count());
        u32 most = t.k <= 32u ? 64u : min(2u * t.k, MOST_CANDIDATES);
        if (total > most) {
            total = narrow(v, t.k, most, &low, &high, total, bitmap, shared_words, warp, lane);
        }
        if (warp) return 0u;
        list = shared_words + LIST_AT;
        list_candidates(bitmap, list, lane);
        if (total > t.k) choose(list, state, total, t.k, low, high, lane);
    } else if (warp) {
        return 0u;
    }
    return send_tile(job, t, chunk, list, state, lane);
}

// --- decode ----------------------------------------------------------------------------------------------------------

// Where a chunk's part of a section begins in every buffer: a word, and a bit of it.
struct Start {
    i64 word;
    u32 bit;
};

__device__ Start start_of(i64 section, u32 bits, u32 chunk) {
    u64 start = (u64)bits * chunk;
    return {section + (i64)(start >> 5), (u32)start & 31u};
}

// Call visit(index, entry) for what a sender sent of a chunk, whose indices begin at a bit; one warp does.
template <class Visit>
__device__ void visit_tile(const Tensor& t, const u32* words, u32 bit, u32 lane, Visit visit) {
    const u32 low = t.section.low_bits, code = t.section.code;
    if (code == PACKED) {
        for (u32 entry = lane; entry < t.k; entry += 32u) {
            visit(get(words, bit + entry * t.section.entry_bits, t.section.entry_bits), entry);
        }
        return;
    }
    // Where the bits of 128 high parts are set, in their order, so that every lane has an entry.
    u32* places = shared_words + PLACES_AT;
    u32 ends = code == BITMAP ? 4096u : t.k + (4095u >> low), highs = bit + t.k * low, seen = 0u;
    ROLLED for (u32 first = 0u; first < ends; first += 128u) {
        u32 at = first + 32u * (lane & 3u), count = 0u;
        u32 own = at < ends ? get(words, highs + at, min(32u, ends - at)) : 0u;
        UNROLL for (u32 i = 0u; i < 4u; i++) {
            u32 word = __shfl_sync(ALL, own, i);
            if (word & (1u << lane)) places[count + __popc(word & ((1u << lane) - 1u))] = first + 32u * i + lane;
            count += __popc(word);
        }
        __syncwarp();
        ROLLED for (u32 i = lane; i < count; i += 32u) {
            u32 entry = seen + i, high = places[i] - (code == BITMAP ? 0u : entry);
            visit((high << low) | get(words, bit + entry * low, low), entry);
        }
        __syncwarp();
        seen += count;
    }
}

// Divide as IEEE has it, by what is not a power of two: exact for all but tiny and infinite numbers, which `is_extreme`
// says there are.
__device__ float divided(float sum, float divisor, float reciprocal, bool is_extreme) {
    if (is_extreme) return sum / divisor;
    float quotient = sum * reciprocal;
    return fmaf(fmaf(-quotient, divisor, sum), reciprocal, quotient);
}

// Add what all senders sent of a chunk, in their order, to the tile, each value times a power of two. Return whether some
// are so small or large that not only powers of two would be lost by that, or by divided().
__device__ bool add_senders(const Job& job, const Tensor& t, u32 chunk, float factor, u32 lane) {
    float* tile = tile_floats();
    const u32 LEAST = 47u << 23, LARGE = 227u << 23;  // 2**-80 and 2**100
    const Start indices = start_of(t.section.indices, t.k * t.section.entry_bits + t.section.chunk_bits, chunk);
    const Start values = start_of(t.section.values, t.k * t.value_bits + t.section.value_padding, chunk);
    bool is_extreme = false;
    ROLLED for (u32 sender = 0u; sender < job.senders; sender++) {
        const u32* words = job.words + job.starts[2u * sender];
        GLOBAL(words);
        const u32* codes = words + values.word;
        Scales scales = get_scales(words, t, t.section, chunk);
        visit_tile(t, words + indices.word, indices.bit, lane, [&](u32 index, u32 entry) {
            u32 code = get(codes, values.bit + entry * t.value_bits, t.value_bits);
            float value = t.values == BF16 ? bf16_value(code) : dequantise(t.values, code, scales);
            float sum = tile[index & 4095u] + value * factor, watched = job.is_exact ? value : sum;
            tile[index & 4095u] = sum;
            is_extreme = is_extreme || (watched != 0.0f && magnitude_of(watched) - LEAST >= LARGE - LEAST);
        });
        __syncwarp();
    }
    return __any_sync(ALL, is_extreme);
}

// Count in the tile how many senders sent each coefficient of a chunk.
__device__ void count_senders(const Job& job, const Tensor& t, u32 chunk, u32 lane) {
    const Start indices = start_of(t.section.indices, t.k * t.section.entry_bits + t.section.chunk_bits, chunk);
    ROLLED for (u32 sender = 0u; sender < job.senders; sender++) {
        const u32* words = job.words + job.starts[2u * sender] + indices.word;
        GLOBAL(words);
        visit_tile(t, words, indices.bit, lane, [&](u32 index, u32) { shared_words[index & 4095u]++; });
        __syncwarp();
    }
}

// Clear the first 4,096 words of the tile; one warp does.
__device__ void clear_tile(u32 lane) {
    UNROLL for (u32 i = 0u; i < 32u; i++) ((Quad*)shared_words)[lane + 32u * i] = {0u, 0u, 0u, 0u};
    __syncwarp();
}

// Fill the registers with the averages of a chunk's coefficients: those of frequency `thread` down the columns.
__device__ void load_averages(float (&v)[64], const Job& job, const Tensor& t, u32 chunk) {
    const float* tile = tile_floats();
    const u32 thread = threadIdx.x, lane = thread & 31u;
    u32 counts[16];
    if (!job.divisor) {
        if (thread < 32u) {
            clear_tile(lane);
            count_senders(job, t, chunk, lane);
        }
        __syncthreads();
        UNROLL for (u32 i = 0u; i < 16u; i++) {
            counts[i] = 0u;
            UNROLL for (u32 j = 0u; j < 4u; j++) counts[i] |= shared_words[(4u * i + j) * SIDE + thread] << (8u * j);
        }
        __syncthreads();
    }
    if (thread < 32u) {
        float factor = job.is_exact ? job.reciprocal : 1.0f;
        clear_tile(lane);
        bool is_extreme = add_senders(job, t, chunk, factor, lane);
        if (is_extreme && factor != 1.0f) {
            clear_tile(lane);
            add_senders(job, t, chunk, 1.0f, lane);
        }
        if (lane == 0u) shared_words[EXTREME_AT] = is_extreme;
    }
    __syncthreads();
    bool is_extreme = shared_words[EXTREME_AT] != 0u;
    if (job.is_exact && !is_extreme) {
        UNROLL for (u32 j = 0u; j < SIDE; j++) v[OUT[j]] = tile[j * SIDE + thread];
    } else if (job.divisor) {
        float divisor = (float)job.divisor;
        UNROLL for (u32 j = 0u; j < SIDE; j++) {
            v[OUT[j]] = divided(tile[j * SIDE + thread], divisor, job.reciprocal, is_extreme);
        }
    } else {
        UNROLL for (u32 j = 0u; j < SIDE; j++) {
            u32 count = (counts[j / 4u] >> (8u * (j % 4u))) & 0xFFu;
            float sum = tile[j * SIDE + thread];
            v[OUT[j]] = count > 1u ? sum / (float)count : sum;
        }
    }
}

// An element's transform lacks a factor of 2**-6, which no sign depends on, unless the product rounds to zero.
const float SIDE_SCALE = 0.015625f;
const float NO_SIGN = 4.4841550858394146e-44f;  // 2**-144

template <int EPILOGUE>
__device__ float stepped(const Job& job, float before, float average) {
    if (EPILOGUE == STORE) return average;
    float lr = (float)job.lr, kept = before * (float)job.keep;
    if (EPILOGUE == PLAIN_STEP) return kept - average;
    float step = __uint_as_float((__float_as_uint(average) & 0x80000000u) ^ __float_as_uint(lr));
    return fabsf(average) > NO_SIGN ? kept - step : kept;  // NaN has no sign
}

// Four or eight elements of a row.
template <int EPILOGUE, int ELEMENT>
__device__ Quad step_quad(const Job& job, Quad before, const float* averages) {
    if (ELEMENT == FLOAT) {
        Quad y = *(const Quad*)averages;
        return {__float_as_uint(stepped<EPILOGUE>(job, __uint_as_float(before.x), __uint_as_float(y.x))),
                __float_as_uint(stepped<EPILOGUE>(job, __uint_as_float(before.y), __uint_as_float(y.y))),
                __float_as_uint(stepped<EPILOGUE>(job, __uint_as_float(before.z), __uint_as_float(y.z))),
                __float_as_uint(stepped<EPILOGUE>(job, __uint_as_float(before.w), __uint_as_float(y.w)))};
    }
    u32 words[4] = {before.x, before.y, before.z, before.w};
    UNROLL for (u32 i = 0u; i < 4u; i++) {
        float low = half_value(ELEMENT, words[i] & 0xFFFFu), high = half_value(ELEMENT, words[i] >> 16);
        u32 stepped_low = half_code(ELEMENT, stepped<EPILOGUE>(job, low, averages[2u * i]));
        words[i] = stepped_low | (half_code(ELEMENT, stepped<EPILOGUE>(job, high, averages[2u * i + 1u])) << 16);
    }
    return {words[0], words[1], words[2], words[3]};
}

// Step a whole chunk by the averages in the tile, rows side by side, 16 bytes at a time. All loads of a batch come
// before its stores: the compiler cannot know that rows do not overlap, and would wait for each.
template <int EPILOGUE, int ELEMENT>
__device__ void step_rows(const Job& job, char* memory, u64 pitch) {
    const u32 NBYTES = ELEMENT == FLOAT ? 4u : 2u, NUMEL = 16u / NBYTES, ACROSS = SIDE / NUMEL;
    // Without loads to wait for, a larger batch is no faster, and needs more registers than there are.
    const u32 BATCH = EPILOGUE == STORE ? 4u : 8u;
    const u32 thread = threadIdx.x, down = thread / ACROSS, across = thread % ACROSS * NUMEL;
    const float* averages = tile_floats() + down * PITCH + across;
    u64 step = NUMEL * pitch;
    char* row = memory + down * pitch + across * NBYTES;
    OPAQUE(step);
    OPAQUE(row);
    GLOBAL(row);
    ROLLED for (u32 first = 0u; first < SIDE / NUMEL; first += BATCH) {
        char* rows[BATCH];
        Quad before[BATCH] = {};
        UNROLL for (u32 i = 0u; i < BATCH; i++, row += step) {
            rows[i] = row;
            if (EPILOGUE != STORE) before[i] = *(const Quad*)row;
        }
        UNROLL for (u32 i = 0u; i < BATCH; i++, averages += NUMEL * PITCH) {
            *(Quad*)rows[i] = step_quad<EPILOGUE, ELEMENT>(job, before[i], averages);
        }
    }
}

// Step a column of the tile at the rim, or one of rows that 16 bytes do not fit.
template <int EPILOGUE, int ELEMENT>
__device__ void step_column(const Job& job, char* column, u64 pitch, u32 rows) {
    const u32 BATCH = 8u;
    const float* averages = tile_floats() + threadIdx.x;
    for (u32 first = 0u; first < rows; first += BATCH) {
        float before[BATCH];
        UNROLL for (u32 i = 0u; i < BATCH; i++) {
            before[i] = 0.0f;
            if (EPILOGUE != STORE && first + i < rows) before[i] = read_element<ELEMENT>(column + (first + i) * pitch);
        }
        UNROLL for (u32 i = 0u; i < BATCH; i++) {
            if (first + i >= rows) continue;
            float after = stepped<EPILOGUE>(job, before[i], averages[(first + i) * PITCH]);
            write(column + (first + i) * pitch, ELEMENT, 0, after);
        }
    }
}

// Step a chunk by the averages in the tile.
template <int EPILOGUE, int ELEMENT>
__device__ void step_tile(const Job& job, char* memory, u64 pitch, u32 rows, u32 cols) {
    const u32 thread = threadIdx.x, NBYTES = ELEMENT == FLOAT ? 4u : 2u;
    GLOBAL(memory);
    if (rows == SIDE && cols >= SIDE && (((u64)memory | pitch) & 15u) == 0u) {
        step_rows<EPILOGUE, ELEMENT>(job, memory, pitch);
    } else {
        step_column<EPILOGUE, ELEMENT>(job, memory + thread * NBYTES, pitch, thread < cols ? rows : 0u);
    }
}

template <int EPILOGUE>
__device__ void decode_tile(const Job& job, const Tensor& t, const Operand& at, Place place) {
    const u32 thread = threadIdx.x, nbytes = element_nbytes(at.element);
    const u64 pitch = (u64)t.cols * nbytes;
    const u32 rows = min((u32)t.rows - place.row, SIDE), cols = (u32)t.cols - place.col;
    char* memory = (char*)at.memory + place.row * pitch + (u64)place.col * nbytes;
    float* tile = tile_floats();
    float v[64];
    load_averages(v, job, t, place.chunk);
    idct64(v);
    __syncthreads();
    UNROLL for (u32 i = 0u; i < SIDE; i += 4u) {
        *(Quad*)(tile + thread * PITCH + i) = {__float_as_uint(v[i]), __float_as_uint(v[i + 1u]),
                                               __float_as_uint(v[i + 2u]), __float_as_uint(v[i + 3u])};
    }
    __syncthreads();
    UNROLL for (u32 i = 0u; i < SIDE; i++) v[OUT[i]] = tile[i * PITCH + thread];
    idct64(v);
    UNROLL for (u32 i = 0u; i < SIDE; i++) {
        tile[i * PITCH + thread] = EPILOGUE == SIGN_STEP ? v[i] : v[i] * SIDE_SCALE;
    }
    __syncthreads();
    if (at.element == FLOAT) step_tile<EPILOGUE, FLOAT>(job, memory, pitch, rows, cols);
    if (at.element == BFLOAT16) step_tile<EPILOGUE, BFLOAT16>(job, memory, pitch, rows, cols);
    if (at.element == HALF) step_tile<EPILOGUE, HALF>(job, memory, pitch, rows, cols);
}
