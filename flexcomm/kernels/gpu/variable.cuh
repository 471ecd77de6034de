// Payloads whose number of entries depends on the data: what reaches a threshold is counted, the threshold raised where
// that is too much, and each chunk given its share and its place; a receiver reads the shares and finds the places.
//
// See choose_threshold() in flexcomm/kernels/plan.py, and plan_layout() in layout.py.

const u32 BINS = 1u << 15;

// Count what reaches the threshold in each chunk, and magnitudes above its bin by the upper half of their bits. Counting
// again, after the threshold was raised, what reaches it and what is above its bin.
__device__ void count_block(const Job& job) {
    const Place place = job.places[blockIdx.x];
    const Tensor& t = job.tensors[place.tensor];
    const Operand at = job.operands[place.tensor];
    u32 low = job.is_recount ? job.totals[1u + t.variable] : t.tau_bits;
    if (job.is_recount && !job.totals[1u + job.variables + t.variable]) return;
    u32 *counts = job.counts + t.first_counted, *bins = job.bins + (i64)(t.variable - 1u) * BINS;
    Block block = make_block(job, t, at, place.chunk);
    by_group(block, place.chunk, [&](u32 first, u32 here) {
        accumulate(block, first, here);
        by_team(block, first, here, [&](u32 chunk) {
            u32 count = count_reaching(block, low), above = job.is_recount ? count_reaching(block, bin_end(low)) : 0u;
            if (block.rank == 0u) {
                counts[chunk] = count;
                counts[job.counted + chunk] = above;
            }
        });
        if (job.is_recount) return;
        by_coefficient(block, here, [&](u32, u32, float& cell) {
            u32 bin = magnitude_of(cell) >> BIN_SHIFT;
            // Most are below, and nobody asks for them.
            if (bin > low >> BIN_SHIFT) atomicAdd(bins + bin, 1u);
        });
    });
}

// Return the sum of what the threads of a block before this one hold, and of all.
__device__ u32 before_thread(u32 mine, u32* total) {
    const u32 lane = threadIdx.x & 31u, warp = threadIdx.x >> 5;
    u32 before = before_lane(mine, lane);
    __syncthreads();  // sums of the call before are read
    if (lane == 31u) shared_words[warp] = before + mine;
    __syncthreads();
    *total = 0u;
    for (u32 other = 0u; other < blockDim.x >> 5; other++) {
        u32 sum = shared_words[other];
        if (other < warp) before += sum;
        *total += sum;
    }
    return before;
}

__device__ u32 sum_of_block(u32 mine) {
    u32 total;
    before_thread(mine, &total);
    return total;
}

// Raise the threshold of a tensor of which more than `k` reach it, to the bin at which k are exceeded.
__device__ void raise_threshold(const Job& job) {
    const Tensor& t = job.tensors[job.places[blockIdx.x].tensor];
    const u32 *counts = job.counts + t.first_counted, *bins = job.bins + (i64)(t.variable - 1u) * BINS;
    u32 reaching = 0u;
    for (u32 chunk = threadIdx.x; chunk < t.chunks; chunk += blockDim.x) reaching += counts[chunk];
    bool is_raised = sum_of_block(reaching) > t.k;
    // Thread 0 has the highest bins: before a thread are those of larger magnitudes.
    u32 share = BINS / blockDim.x, last = BINS - threadIdx.x * share, mine = 0u, total;
    for (u32 bin = last - share; bin < last; bin++) mine += bins[bin];
    u32 larger = before_thread(mine, &total);
    u32 first = (t.tau_bits >> BIN_SHIFT) + 1u;
    if (threadIdx.x == 0u) {
        job.totals[1u + t.variable] = t.tau_bits;
        job.totals[1u + job.variables + t.variable] = is_raised;
    }
    __syncthreads();
    if (!is_raised || larger > t.k || (larger + mine <= t.k && last - share > first)) return;
    // In this thread's share, or else below all of them, is the lowest bin whose sum with all above is at most k.
    u32 lowest = last;
    while (lowest > max(first, last - share) && larger + bins[lowest - 1u] <= t.k) larger += bins[--lowest];
    if (lowest < first) return;
    job.totals[1u + t.variable] = max(t.tau_bits, (lowest << BIN_SHIFT) - (1u << BIN_SHIFT));
}

// Return where the sections of a payload of so many entries are, from its beginning, and how long it is.
__device__ Section layout_of(const Tensor& t, u32 entries, i64* nwords) {
    u32 length = t.chunk_numel, width = 1u;
    while ((length - 1u) >> width) width++;
    Section section = t.section;
    i64 least = (i64)entries * width;
    section.code = PACKED;
    section.low_bits = section.chunk_bits = section.value_padding = 0u;
    section.entry_bits = width;
    for (u32 low = 0u; low < width; low++) {
        i64 bits = (i64)entries * (low + 1u) + (i64)t.chunks * ((length - 1u) >> low);
        if (bits >= least) continue;
        least = bits;
        section.code = ELIAS_FANO;
        section.low_bits = low;
        section.entry_bits = low + 1u;
        section.chunk_bits = (length - 1u) >> low;
    }
    if ((i64)t.chunks * length < least) {
        least = (i64)t.chunks * length;
        section.code = BITMAP;
        section.low_bits = section.entry_bits = 0u;
        section.chunk_bits = length;
    }
    section.indices = counts_words(t);
    section.scales = section.indices + (least + 31) / 32;
    section.values = section.scales + ((i64)t.chunks * t.scales * 16 + 31) / 32;
    *nwords = section.values + ((i64)entries * t.value_bits + 31) / 32;
    return section;
}

__device__ Section moved(Section section, i64 words) {
    section.indices += words;
    section.scales += words;
    section.values += words;
    return section;
}

// Return a payload's sections from its beginning, for a number of entries, and how long it is.
__device__ Section sections_of(const Tensor& t, u32 entries, i64* nwords) {
    if (t.variable_length) return layout_of(t, entries, nwords);
    *nwords = t.nwords;
    return moved(t.section, counts_words(t) - t.section.indices);
}

// Give each chunk of a tensor its share of the entries: how many precede each. Returns how many there are.
__device__ u32 share_out(const Job& job, const Tensor& t) {
    const u32 *reaching = job.counts + t.first_counted, *above = reaching + job.counted;
    u32* before = job.before + t.first_counted + t.variable - 1u;
    bool is_raised = job.totals[1u + job.variables + t.variable];
    u32 all_above = 0u, entries = 0u, equal = 0u;
    for (u32 chunk = threadIdx.x; is_raised && chunk < t.chunks; chunk += blockDim.x) all_above += above[chunk];
    u32 room = t.k - sum_of_block(all_above);
    for (u32 first = 0u; first < t.chunks; first += blockDim.x) {
        u32 chunk = first + threadIdx.x, sum;
        u32 count = chunk < t.chunks ? reaching[chunk] : 0u;
        if (is_raised) {
            u32 larger = chunk < t.chunks ? above[chunk] : 0u, between = count - larger;
            u32 skipped = equal + before_thread(between, &sum);
            count = larger + min(between, room > skipped ? room - skipped : 0u);
            equal += sum;
        }
        u32 preceding = entries + before_thread(count, &sum);
        if (chunk < t.chunks) before[chunk] = preceding;
        entries += sum;
    }
    if (threadIdx.x == 0u) before[t.chunks] = entries;
    return entries;
}

// Find places for all payloads of a buffer to be written; one block does.
__device__ void place_payloads(const Job& job) {
    i64 position = HEADER_WORDS, nwords;
    u32 entries = 0u;
    for (u32 number = 0u; number < job.tensor_count; number++) {
        const Tensor& t = job.tensors[number];
        u32 sent = t.variable ? share_out(job, t) : t.k * t.chunks;
        Section section = moved(sections_of(t, sent, &nwords), position);
        section.before = t.variable ? job.before + t.first_counted + t.variable - 1u : nullptr;
        if (threadIdx.x == 0u) job.placed[number] = section;
        position += nwords;
        entries += sent;
    }
    if (threadIdx.x == 0u) {
        job.totals[0] = entries;
        job.totals[1] = (u32)position;
    }
}

// Read the counts of a payload that begins at a word: how many precede each chunk. Returns how many there are; more than
// there can be, if a chunk is said to hold more than it can.
__device__ u32 read_counts(const Job& job, const Tensor& t, i64 start, u32* before) {
    u64 entries = 0u;
    bool fits = true;
    for (u32 first = 0u; first < t.chunks; first += blockDim.x) {
        u32 chunk = first + threadIdx.x, sum;
        u32 count = chunk < t.chunks ? get(job.words, 32 * start + (i64)chunk * t.count_bits, t.count_bits) : 0u;
        fits = fits && count <= t.chunk_numel;
        u32 preceding = (u32)entries + before_thread(min(count, t.chunk_numel), &sum);
        if (chunk < t.chunks) before[chunk] = preceding;
        entries += sum;
    }
    if (threadIdx.x == 0u) before[t.chunks] = (u32)entries;
    fits = !__syncthreads_or(!fits);
    return fits && entries <= t.k ? (u32)entries : t.k + 1u;
}

// Find the payloads of a sender's buffer; leave the first problem of counts and lengths. A block for each sender does.
__device__ void locate_payloads(const Job& job) {
    const u32 sender = blockIdx.x;
    const i64 start = job.starts[2u * sender], nwords = job.starts[2u * sender + 1u];
    i64 position = HEADER_WORDS, used;
    u64 entries = 0u, problem = NOTHING_FOUND;
    for (u32 number = 0u; problem == NOTHING_FOUND && number < job.tensor_count; number++) {
        const Tensor& t = job.tensors[number];
        u32* before = nullptr;
        u32 sent = t.k * t.chunks;
        if (t.variable) {
            sections_of(t, 0u, &used);
            if (position + used > nwords) {
                problem = ((u64)number << 8) | LENGTH_PROBLEM;
                break;
            }
            before = job.before + (i64)sender * (job.counted + job.variables) + t.first_counted + t.variable - 1u;
            sent = read_counts(job, t, start + position, before);
            if (sent > t.k) {
                problem = ((u64)number << 8) | COUNTS_PROBLEM;
                break;
            }
        }
        Section section = moved(sections_of(t, sent, &used), start + position);
        section.before = before;
        if (threadIdx.x == 0u) job.placed[(i64)sender * job.tensor_count + number] = section;
        if (position + used > nwords) problem = (t.variable ? (u64)number << 8 : 0u) | LENGTH_PROBLEM;
        position += used;
        entries += sent;
    }
    if (threadIdx.x != 0u) return;
    const u32* words = job.words + start;
    u64 announced = words[ENTRIES_WORD] | ((u64)words[ENTRIES_WORD + 1u] << 32);
    if (problem == NOTHING_FOUND && ((position + 3) & ~(i64)3) != nwords) problem = LENGTH_PROBLEM;
    if (problem == NOTHING_FOUND && entries != announced) problem = ENTRIES_PROBLEM;
    if (problem != NOTHING_FOUND) atomicMin(&job.tally[sender].problem, problem);
}

// Add up the words of a buffer to be sent, a share a block, and close it.
__device__ void seal_block(const Job& job) {
    u32 used = job.is_variable_length ? job.totals[1] : job.used_words, sum = 0u;
    u32 first = max(HEADER_WORDS, blockIdx.x * job.share), last = min(used, (blockIdx.x + 1u) * job.share);
    for (u32 word = first + threadIdx.x; word < last; word += blockDim.x) sum += hashed(job.words[word], word);
    if (threadIdx.x >= 32u) {
        sum = add_lanes(sum);
        if ((threadIdx.x & 31u) == 0u) atomicAdd(&job.tally->checksum, sum);
    }
    __syncthreads();
    if (threadIdx.x < 32u) close_buffer(job, sum, threadIdx.x);
}
