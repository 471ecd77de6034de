// Chunks of any shape: a block reads its chunks once, works on them in shared memory, and writes them once.
//
// The team of threads that works on one chunk is either the whole block, or, for short chunks of one row, a single
// thread. Both run the same text: a team of one has nobody to wait for, and what it would add up is already its own.

const u32 SUM_LANES = 32u;
const u32 BIN_SHIFT = 16u;

struct Block {
    const Job& job;
    const Tensor& t;
    const Operand& at;
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
    u32 largest_element;   // that this thread has read, as bits

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

__device__ Block make_block(const Job& job, const Tensor& t, const Operand& at, u32 begin) {
    // The counters come first: a workspace holds areas only, those of a tensor's first block, and so on.
    u32* areas = t.workspace ? t.workspace + (i64)(begin / t.unit) * t.block_words : shared_words + 4u + 2u * blockDim.x;
    bool alone = t.group > 1u;
    Block block = {job,
                   t,
                   at,
                   threadIdx.x,
                   blockDim.x,
                   alone ? 0u : threadIdx.x,
                   alone ? 1u : blockDim.x,
                   t.chunk_numel,
                   alone ? threadIdx.x : 0u,
                   t.pitch,
                   (float*)areas,
                   (float*)(areas + t.turned_at),
                   areas + t.marks_at,
                   areas + t.ranks_at,
                   t.group,
                   shared_words,
                   shared_words + 4u,
                   0u,
                   0u};
    if (block.thread < 3u) shared_words[block.thread] = 0u;
    __syncthreads();
    return block;
}

// Call work(first, here) for the chunks of a block, a group at a time: so many from `first` on.
template <class Work>
__device__ void by_group(const Block& block, u32 begin, Work work) {
    const Tensor& t = block.t;
    for (u32 unit = begin; unit < t.chunks; unit += t.stride) {
        u32 end = min(unit + t.unit, t.chunks);
        for (u32 first = unit; first < end; first += t.group) {
            work(first, min(t.group, end - first));
            __syncthreads();
        }
        if (t.stride == 0u) return;
    }
}

// Call work(chunk) once in each team that has one of the group's chunks.
template <class Work>
__device__ void by_team(Block& block, u32 first, u32 here, Work work) {
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

// --- marks -----------------------------------------------------------------------------------------------------------

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

// --- elements --------------------------------------------------------------------------------------------------------

// Return where element (i, j) of a chunk is, or -1 if it is beyond the rim.
__device__ i64 place_of(const Tensor& t, u32 chunk, u32 i, u32 j) {
    u32 down = chunk / t.grid_cols, across = chunk % t.grid_cols;
    i64 row = (i64)down * t.chunk_rows + i, col = (i64)across * t.chunk_cols + j;
    return row < t.rows && col < t.cols ? row * t.cols + col : -1;
}

__device__ float load_element(Block& block, u32 chunk, u32 i, u32 j) {
    i64 at = place_of(block.t, chunk, i, j);
    if (at < 0) return 0.0f;
    float value = read<float>(block.at.memory, block.at.element, at);
    u32 magnitude = magnitude_of(value);
    if (block.at.element == DOUBLE) {  // what is below the bound may be rounded to it
        bool fits = fabs(((const double*)block.at.memory)[at]) < (double)__uint_as_float(TOO_LARGE);
        magnitude = fits ? 0u : INFINITE;
    }
    block.largest_element = max(block.largest_element, magnitude);
    return value;
}

// Do with an element and its average what the epilogue says.
template <int EPILOGUE, class Number>
__device__ void step_element(const Job& job, void* memory, u32 element, i64 at, float average) {
    if (EPILOGUE == STORE) {
        write(memory, element, at, (Number)average);
        return;
    }
    Number step = (Number)average;
    if (EPILOGUE == SIGN_STEP) step = (Number)((average > 0.0f) - (average < 0.0f)) * (Number)job.lr;
    write(memory, element, at, read<Number>(memory, element, at) * (Number)job.keep - step);
}

template <int EPILOGUE>
__device__ void store_element(const Block& block, u32 chunk, u32 i, u32 j, float average) {
    i64 at = place_of(block.t, chunk, i, j);
    if (at < 0) return;
    if (block.at.element == DOUBLE) {
        step_element<EPILOGUE, double>(block.job, block.at.memory, DOUBLE, at, average);
    } else {
        step_element<EPILOGUE, float>(block.job, block.at.memory, block.at.element, at, average);
    }
}

// --- transform -------------------------------------------------------------------------------------------------------

__device__ void do_step(const Step& step, float* x, float* y) {
    float a = *x, b = *y;
    if (step.code == BUTTERFLY) {
        *x = a + b;
        *y = a - b;
    } else if (step.code == ROTATE) {
        a = fmaf(step.c0, b, a);
        b = fmaf(step.c1, a, b);
        *x = fmaf(step.c0, b, a);
        *y = b;
    } else if (step.code == ADD_SCALED) {
        *x = fmaf(step.c0, b, a);
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
__device__ void transform_chunks(Block& block, u32 first, u32 here) {
    const Tensor& t = block.t;
    u32 height = t.chunk_rows, width = t.chunk_cols, down = t.pitch_down;
    if (height > 1u) {
        apply_to(block, t.down, block.row, height, width, down, true,
                 [&](u32 i, u32 j) { return load_element(block, first, i, j); });
    }
    u32 lanes = height > 1u ? height : here;
    apply_to(block, t.along, block.turned, width, lanes, t.pitch_along, false, [&](u32 j, u32 i) {
        return height > 1u ? block.row[t.down.outputs[i] * down + j] : load_element(block, first + i, 0u, j);
    });
}

// Use the elements whose coefficients are in `row`, transformed back.
template <int EPILOGUE>
__device__ void restore_chunks(Block& block, u32 first, u32 here) {
    const Tensor& t = block.t;
    u32 height = t.chunk_rows, width = t.chunk_cols;
    if (!t.transformed) {
        by_coefficient(block, here, [&](u32 g, u32 k, float& cell) {
            store_element<EPILOGUE>(block, first + g, k / width, k % width, cell * t.scale);
        });
        return;
    }
    u32 down = t.pitch_down, along = t.pitch_along, lanes = height > 1u ? height : here;
    u32 pitch = height > 1u ? height : t.pitch;
    apply_to(block, t.inverse_along, block.turned, width, lanes, along, true,
             [&](u32 j, u32 i) { return block.row[j * pitch + i]; });
    if (height > 1u) {
        apply_to(block, t.inverse_down, block.row, height, width, down, true,
                 [&](u32 i, u32 j) { return block.turned[t.inverse_along.outputs[j] * along + i]; });
    }
    for (u32 e = block.thread; e < lanes * width; e += block.threads) {
        u32 i = e / width, j = e % width;
        if (height > 1u) {
            store_element<EPILOGUE>(block, first, i, j, block.row[t.inverse_down.outputs[i] * down + j] * t.scale);
        } else {
            float average = block.turned[t.inverse_along.outputs[j] * along + i];
            store_element<EPILOGUE>(block, first + i, 0u, j, average * t.scale);
        }
    }
}

// Return coefficient k of a chunk before it is scaled; a transformed chunk is kept turned.
__device__ float coefficient(Block& block, u32 chunk, u32 g, u32 k) {
    const Tensor& t = block.t;
    u32 height = t.chunk_rows, width = t.chunk_cols;
    if (!t.transformed) return load_element(block, chunk, k / width, k % width);
    return block.turned[t.along.outputs[k / height] * t.pitch_along + (height == 1u ? g : k % height)];
}

// Call visit(g, k, cell, value) for every coefficient of the group, multiplied by the operand's factor.
template <class Visit>
__device__ void by_scaled(Block& block, u32 first, u32 here, Visit visit) {
    if (block.t.transformed) transform_chunks(block, first, here);
    by_coefficient(block, here, [&](u32 g, u32 k, float& cell) {
        visit(g, k, cell, coefficient(block, first + g, g, k) * block.at.factor);
    });
    __syncthreads();
}

// Fill `row` with what the chunks hold: decay * state + factor * coefficients. Return whether all elements can be sent.
__device__ bool accumulate(Block& block, u32 first, u32 here) {
    block.largest_element = 0u;
    by_scaled(block, first, here, [&](u32 g, u32 k, float& cell, float value) {
        const float* state = block.at.state;
        cell = state ? block.job.decay * state[(i64)(first + g) * block.length + k] + value : value;
    });
    return !__syncthreads_or(block.largest_element >= TOO_LARGE);
}

// --- selection -------------------------------------------------------------------------------------------------------

__device__ bool is_dense(const Tensor& t) { return t.selection != THRESHOLD && t.k == t.chunk_numel; }

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
__device__ void mark_shared(Block& block, u32 chunk) {
    u32 length = block.length, k = block.t.k, start = block.at.start, key = mix32(block.at.key + chunk * GOLDEN);
    clear_marks(block, length);
    for (u32 entry = block.rank; entry < k; entry += block.size) {
        if (block.t.selection == RANDOM_K) {
            mark(block, shuffled((start + entry) % length, length, key));
        } else {
            mark(block, (u32)(((u64)entry * length / k + start) % length));
        }
    }
}

// Return how many entries precede a chunk in its payload.
__device__ u32 entries_before(const Tensor& t, const Section& section, u32 chunk) {
    return section.before ? section.before[chunk] : chunk * t.k;
}

__device__ u32 entries_of(const Tensor& t, const Section& section, u32 chunk) {
    return section.before ? section.before[chunk + 1u] - section.before[chunk] : t.k;
}

// Mark and rank what is sent of a chunk; return how many.
__device__ u32 select(Block& block, const Section& section, u32 chunk) {
    const Tensor& t = block.t;
    if (is_dense(t)) return block.length;
    if (t.selection == TOP_K) {
        mark_top_k(block, t.k);
    } else if (t.selection == THRESHOLD) {
        u32 low = block.job.totals[1u + t.variable], reaching = count_reaching(block, low);
        mark_reaching(block, low, bin_end(low), reaching, entries_of(t, section, chunk));
    } else {
        mark_shared(block, chunk);
    }
    return rank_marks(block, block.length);
}

// Call visit(index, entry) for everything selected.
template <class Visit>
__device__ void visit_selected(Block& block, Visit visit) {
    if (!is_dense(block.t)) {
        visit_marks(block, block.length, visit);
        return;
    }
    for (u32 i = block.rank; i < block.length; i += block.size) visit(i, i);
}

// --- scales ----------------------------------------------------------------------------------------------------------

// Return the mean magnitude of what is sent: entry e into lane e % 32, then lanes in halves, as every kernel set does.
__device__ float mean_magnitude(Block& block, u32 count) {
    visit_selected(block, [&](u32 i, u32 entry) { block.spare(entry) = fabsf(block.cell(i)); });
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

__device__ Extremes extremes_of(Block& block) {
    u32 largest = 0u, below = 0u;
    visit_selected(block, [&](u32 i, u32) {
        largest = max(largest, block.magnitude(i));
        below = max(below, MAGNITUDE - block.magnitude(i));
    });
    largest = block.largest(largest);
    return {MAGNITUDE - block.largest(below), largest};
}

struct ScaleCodes {
    u32 first, second;
};

__device__ ScaleCodes scales_between(u32 least, u32 largest) {
    u32 first = least >> 16;
    return {first, bf16_up((__uint_as_float(largest) - bf16_value(first)) / 3.0f)};
}

__device__ u32 int8_scale(u32 largest) { return bf16_up(__uint_as_float(largest) / 127.0f); }

// Write the scales of a chunk; return them as the receiver will read them.
__device__ Scales put_scales(Block& block, const Section& section, u32 count, u32 chunk) {
    const Tensor& t = block.t;
    ScaleCodes codes = {0u, 0u};
    if (t.values == INT8) {
        codes.first = int8_scale(extremes_of(block).largest);
    } else if (t.values == SIGN) {
        codes.first = saturated_bf16(mean_magnitude(block, count));
    } else if (t.values == SIGN2 && count) {
        Extremes extremes = extremes_of(block);
        codes = scales_between(extremes.least, extremes.largest);
    }
    if (block.rank == 0u && t.scales) {
        i64 position = 32 * section.scales + (i64)chunk * t.scales * 16;
        put(block.job.words, position, codes.first, 16u);
        if (t.scales == 2u) put(block.job.words, position + 16, codes.second, 16u);
    }
    return {bf16_value(codes.first), bf16_value(codes.second)};
}

__device__ Scales get_scales(const u32* words, const Tensor& t, const Section& section, u32 chunk) {
    if (!t.scales) return {0.0f, 0.0f};
    i64 position = 32 * section.scales + (i64)chunk * t.scales * 16;
    float step = t.scales == 2u ? bf16_value(get(words, position + 16, 16u)) : 0.0f;
    return {bf16_value(get(words, position, 16u)), step};
}

// --- entries of a payload --------------------------------------------------------------------------------------------

struct Entries {
    u32 count;
    i64 index_bit, value_bit;
};

__device__ Entries find_entries(const Tensor& t, const Section& section, u32 chunk) {
    i64 before = section.before ? (i64)section.before[chunk] : (i64)chunk * t.k;
    i64 index_bit = 32 * section.indices + before * section.entry_bits + (i64)chunk * section.chunk_bits;
    i64 value_bit = 32 * section.values + before * t.value_bits + (i64)chunk * section.value_padding;
    return {entries_of(t, section, chunk), index_bit, value_bit};
}

// Return how many words of counts a payload begins with.
__device__ i64 counts_words(const Tensor& t) { return t.variable ? ((i64)t.chunks * t.count_bits + 31) / 32 : 0; }

// Return where a tensor's payload is in a sender's buffer.
__device__ Section section_of(const Job& job, const Tensor& t, u32 sender) {
    if (job.sections) return job.sections[(i64)sender * job.tensor_count + t.number];
    Section section = t.section;
    i64 start = job.starts[2u * sender];
    section.indices += start;
    section.scales += start;
    section.values += start;
    return section;
}

// Write index `i` of an entry, one of `count` whose indices begin at a bit.
template <class Position>
__device__ void put_index(u32* words, const Section& section, Position bit, u32 count, u32 i, u32 entry) {
    u32 low = section.low_bits, moved = section.code == ELIAS_FANO ? entry : 0u;
    if (section.code == PACKED) {
        put(words, bit + entry * section.entry_bits, i, section.entry_bits);
    } else if (section.code != NO_INDEX) {  // a bitmap has no low bits
        if (low) put(words, bit + entry * low, i & ((1u << low) - 1u), low);
        put(words, bit + count * low + (i >> low) + moved, 1u, 1u);
    }
}

// Call visit(index, entry) for a chunk's entries, which have been verified.
template <class Visit>
__device__ void visit_entries(Block& block, const Section& section, Entries at, Visit visit) {
    const u32* words = block.job.words;
    u32 length = block.length, low = section.low_bits;
    if (section.code == NO_INDEX) {
        visit_selected(block, visit);
        return;
    }
    if (section.code == PACKED) {
        for (u32 entry = block.rank; entry < at.count; entry += block.size) {
            visit(get(words, at.index_bit + (i64)entry * section.entry_bits, section.entry_bits), entry);
        }
        return;
    }
    bool is_bitmap = section.code == BITMAP;
    u32 high_bits = is_bitmap ? length : at.count + ((length - 1u) >> low);
    i64 position = at.index_bit + (i64)at.count * low;
    for (u32 word = block.rank; word < (high_bits + 31u) >> 5; word += block.size) {
        block.mark_word(word) = get(words, position + 32 * (i64)word, min(32u, high_bits - 32u * word));
    }
    rank_marks(block, high_bits);
    visit_marks(block, high_bits, [&](u32 bit, u32 entry) {
        u32 high = is_bitmap ? bit : bit - entry;
        visit((high << low) | get(words, at.index_bit + (i64)entry * low, low), entry);
    });
}

// --- encode ----------------------------------------------------------------------------------------------------------

// Write what is sent of a chunk, and leave in `row` what is not; return whether that is finite.
__device__ bool send_chunk(Block& block, const Section& section, u32 chunk) {
    const Job& job = block.job;
    const Tensor& t = block.t;
    u32 count = select(block, section, chunk);
    Entries at = find_entries(t, section, chunk);
    Scales scales = put_scales(block, section, count, chunk);
    bool finite = true;
    if (t.variable && block.rank == 0u) {
        put(job.words, 32 * (section.indices - counts_words(t)) + (i64)chunk * t.count_bits, count, t.count_bits);
    }
    visit_selected(block, [&](u32 i, u32 entry) {
        float value = block.cell(i);
        u32 code = quantise(t.values, value, scales);
        put_index(job.words, section, at.index_bit, count, i, entry);
        put(job.words, at.value_bit + (i64)entry * t.value_bits, code, t.value_bits);
        float unsent = value - dequantise(t.values, code, scales);
        block.cell(i) = job.stays == 0.0f ? unsent : unsent + job.stays * (value - unsent);
        finite = finite && magnitude_of(value) < INFINITE;
    });
    return finite;
}

// Call visit(word) for the words of a unit's part of a section, which it shares with no other unit.
template <class Visit>
__device__ void by_word(const Block& block, i64 section, i64 chunk_bits, u32 unit, u32 end, Visit visit) {
    i64 last = section + (end * chunk_bits + 31) / 32;
    for (i64 word = section + unit * chunk_bits / 32 + block.thread; word < last; word += block.threads) visit(word);
}

template <class Visit>
__device__ void by_unit_word(const Block& block, const Section& section, u32 unit, u32 end, Visit visit) {
    const Tensor& t = block.t;
    by_word(block, section.indices, (i64)t.k * section.entry_bits + section.chunk_bits, unit, end, visit);
    by_word(block, section.scales, 16 * (i64)t.scales, unit, end, visit);
    by_word(block, section.values, (i64)t.k * t.value_bits + section.value_padding, unit, end, visit);
}

// Encode the chunks of a block; return this thread's part of the checksum. Payloads whose length depends on the data
// are zero before, and added up afterwards.
__device__ u32 encode_blocks(const Job& job, const Tensor& t, const Operand& at, u32 begin) {
    Block block = make_block(job, t, at, begin);
    const Section section = job.sections ? job.sections[t.number] : t.section;
    u32* words = job.words;
    u32 sum = 0u;
    by_group(block, begin, [&](u32 first, u32 here) {
        u32 unit = first / t.unit * t.unit, end = min(unit + t.unit, t.chunks);
        if (first == unit && !t.variable) by_unit_word(block, section, unit, end, [&](i64 word) { words[word] = 0u; });
        bool fits = accumulate(block, first, here), finite = true;
        by_team(block, first, here, [&](u32 chunk) { finite = send_chunk(block, section, chunk); });
        finite = !__syncthreads_or(!finite);
        for (u32 g = block.thread; g < here; g += block.threads) {
            job.refused[t.first_chunk + first + g] = !fits || !finite;
        }
        if (!fits || !finite) {
            u64 problem = problem_at(fits ? STATE_PROBLEM : NONFINITE_PROBLEM, t.number);
            if (block.thread == 0u) atomicMin(&job.tally->problem, problem);
        } else if (at.next_state) {
            by_coefficient(block, here, [&](u32 g, u32 k, float& cell) {
                at.next_state[(i64)(first + g) * block.length + k] = cell;
            });
        }
        if (first + here < end || t.variable) return;
        by_unit_word(block, section, unit, end, [&](i64 word) { sum += hashed(words[word], (u32)word); });
    });
    return sum;
}

// Put back what the chunks of a block sent, and take out what they accumulated, unless they were refused:
// m = (m' + alpha * sent - gain * x) / decay. `stays` is alpha, and `decay` one over the decay.
__device__ void roll_back_blocks(const Job& job, const Tensor& t, const Operand& at, u32 begin) {
    Block block = make_block(job, t, at, begin);
    const Section section = job.sections ? job.sections[t.number] : t.section;
    by_group(block, begin, [&](u32 first, u32 here) {
        // Groups of chunks may be others than when they were encoded.
        const u8* refused = job.refused + t.first_chunk + first;
        by_team(block, first, here, [&](u32 chunk) {
            if (refused[block.lane]) return;
            for (u32 i = block.rank; i < block.length; i += block.size) block.cell(i) = 0.0f;
            if (section.code == NO_INDEX) select(block, section, chunk);
            block.sync();
            Entries entries = find_entries(t, section, chunk);
            Scales scales = get_scales(job.words, t, section, chunk);
            visit_entries(block, section, entries, [&](u32 i, u32 entry) {
                u32 code = get(job.words, entries.value_bit + (i64)entry * t.value_bits, t.value_bits);
                block.cell(i) = dequantise(t.values, code, scales);
            });
        });
        by_coefficient(block, here, [&](u32 g, u32 k, float& cell) {
            if (refused[g]) return;
            float* state = at.next_state + (i64)(first + g) * block.length + k;
            *state = job.decay * (*state + cell * job.stays);
        });
        __syncthreads();
        by_scaled(block, first, here, [&](u32 g, u32 k, float&, float value) {
            if (refused[g]) return;
            float* state = at.next_state + (i64)(first + g) * block.length + k;
            *state = *state + value;
        });
    });
}

// --- decode ----------------------------------------------------------------------------------------------------------

// Add a chunk's payloads in the order of senders, and divide. Indices are unique within a payload, so no two threads
// add to the same coefficient before they have met again.
__device__ void add_payloads(Block& block, u32 chunk) {
    const Job& job = block.job;
    const Tensor& t = block.t;
    for (u32 i = block.rank; i < block.length; i += block.size) {
        block.cell(i) = 0.0f;
        if (!job.divisor) block.spare(i) = 0.0f;  // how many gave it
    }
    if (t.section.code == NO_INDEX) select(block, t.section, chunk);
    block.sync();
    for (u32 sender = 0u; sender < job.senders; sender++) {
        const Section section = section_of(job, t, sender);
        Entries at = find_entries(t, section, chunk);
        Scales scales = get_scales(job.words, t, section, chunk);
        visit_entries(block, section, at, [&](u32 i, u32 entry) {
            u32 code = get(job.words, at.value_bit + (i64)entry * t.value_bits, t.value_bits);
            block.cell(i) = block.cell(i) + dequantise(t.values, code, scales);
            if (!job.divisor) block.spare(i) = block.spare(i) + 1.0f;
        });
        block.sync();
    }
    for (u32 i = block.rank; i < block.length; i += block.size) {
        float divisor = job.divisor ? (float)job.divisor : fmaxf(block.spare(i), 1.0f);
        block.cell(i) = block.cell(i) / divisor;
    }
}

template <int EPILOGUE>
__device__ void decode_blocks(const Job& job, const Tensor& t, const Operand& at, u32 begin) {
    Block block = make_block(job, t, at, begin);
    by_group(block, begin, [&](u32 first, u32 here) {
        by_team(block, first, here, [&](u32 chunk) { add_payloads(block, chunk); });
        restore_chunks<EPILOGUE>(block, first, here);
    });
}
