// What was received: a receiver trusts nothing. A thread reads the payload of one chunk from its first entry to its last.

__device__ bool indices_increase(const u32* words, const Tensor& t, const Section& section, Entries at) {
    u32 low = section.low_bits, previous = 0u, found = 0u;
    if (section.code == PACKED) {
        for (; found < at.count; found++) {
            u32 i = get(words, at.index_bit + (i64)found * section.entry_bits, section.entry_bits);
            if (i >= t.chunk_numel || (found && i <= previous)) return false;
            previous = i;
        }
        return true;
    }
    bool is_bitmap = section.code == BITMAP;
    u32 ends = is_bitmap ? t.chunk_numel : at.count + ((t.chunk_numel - 1u) >> low);
    i64 highs = at.index_bit + (i64)at.count * low;
    for (u32 first = 0u; first < ends; first += 32u) {
        for (u32 bits = get(words, highs + first, min(32u, ends - first)); bits; bits &= bits - 1u) {
            if (found == at.count) return false;
            u32 high = first + __ffs(bits) - 1u - (is_bitmap ? 0u : found);
            u32 i = (high << low) | get(words, at.index_bit + (i64)found * low, low);
            if (i >= t.chunk_numel || (found && i <= previous)) return false;
            previous = i;
            found++;
        }
    }
    return found == at.count;
}

__device__ u32 problem_of(const u32* words, const Tensor& t, const Section& section, u32 chunk) {
    Entries at = find_entries(t, section, chunk);
    if (section.code != NO_INDEX && !indices_increase(words, t, section, at)) return INDEX_PROBLEM;
    for (u32 i = 0u; i < t.scales; i++) {
        i64 position = 32 * section.scales + ((i64)chunk * t.scales + i) * 16;
        if (get(words, position, 16u) >= 0x7F80u) return SCALE_PROBLEM;
    }
    u32 infinite = t.values == FP32 ? INFINITE : t.values == BF16 ? 0x7F80u : 0x7C00u;
    for (u32 entry = 0u; t.values <= FP16 && entry < at.count; entry++) {
        u32 code = get(words, at.value_bit + (i64)entry * t.value_bits, t.value_bits);
        if ((code & infinite) == infinite) return VALUE_PROBLEM;
    }
    return NO_PROBLEM;
}

// Problems of payloads come after those of counts and lengths.
const u64 OF_PAYLOAD = (u64)1 << 62;

// Return what is wrong with a sender's buffer, as the word of a status; header first, then the flag, then the payloads.
__device__ u64 judge(const Job& job, u32 sender) {
    const u32* words = job.words + job.starts[2u * sender];
    // By atomics, which find what other blocks left.
    u32 nwords = (u32)job.starts[2u * sender + 1u], checksum = atomicAdd(&job.tally[sender].checksum, 0u);
    u64 problem = atomicMin(&job.tally[sender].problem, NOTHING_FOUND);
    bool is_flagged = words[FLAGS_WORD] >> 16 == 1u;
    for (u32 word = 0u; word < HEADER_WORDS; word++) {
        u32 expected = job.header[word];
        if (word == FLAGS_WORD && is_flagged) expected = (expected & 0xFFFFu) | NONFINITE_FLAG;
        if ((word & ~1u) == ENTRIES_WORD && is_flagged) expected = 0u;
        if ((word & ~1u) == ENTRIES_WORD && !is_flagged && job.sections) expected = words[word];
        if (word == NBYTES_WORD) expected = 4u * (nwords - HEADER_WORDS);
        if (word == NBYTES_WORD + 1u) expected = (nwords - HEADER_WORDS) >> 30;
        if (word == CHECKSUM_WORD) expected = checksum;
        if (words[word] != expected) return status_word(sender, 0u, HEADER_PROBLEM);
    }
    if (is_flagged) return status_word(sender, 0u, NONFINITE_PROBLEM);
    return problem == NOTHING_FOUND ? 0u : ((u64)sender << 40) | (problem & ~OF_PAYLOAD);
}

// Return how urgent a word of a status is: problems of headers, whoever has them, then flags, then all others.
__device__ u32 rank_of(u64 word) {
    u32 problem = (u32)word & 0xFFu;
    return problem == HEADER_PROBLEM ? 0u : problem == NONFINITE_PROBLEM ? 1u : problem ? 2u : 3u;
}

// Leave the first and most urgent problem of all senders; one warp of the last block does.
__device__ void leave_verdict(const Job& job, u32 lane) {
    u64 found = 0u;
    for (u32 sender = lane; sender < job.senders; sender += 32u) {
        u64 word = judge(job, sender);
        if (rank_of(word) < rank_of(found)) found = word;
    }
    for (u32 half = 16u; half; half >>= 1) {
        u64 other = __shfl_xor_sync(ALL, found, half);
        bool is_first = rank_of(other) < rank_of(found) || (rank_of(other) == rank_of(found) && other < found);
        if (is_first) found = other;
    }
    __syncwarp();
    for (u32 sender = lane; sender < job.senders; sender += 32u) {
        job.tally[sender].problem = NOTHING_FOUND;
        job.tally[sender].checksum = 0u;
    }
    if (lane == 0u) *job.status = found;
}

__device__ void verify_block(const Job& job) {
    const u32 sender = blockIdx.x / job.blocks, number = blockIdx.x % job.blocks, thread = threadIdx.x;
    const i64 start = job.starts[2u * sender], nwords = job.starts[2u * sender + 1u];
    Tally& tally = job.tally[sender];
    u32 sum = 0u;
    i64 end = min((i64)(number + 1u) * job.share, nwords);
    for (i64 word = (i64)number * job.share + thread; word < end; word += blockDim.x) {
        if (word != CHECKSUM_WORD) sum += hashed(job.words[start + word], (u32)word);
    }
    sum = add_lanes(sum);
    if ((thread & 31u) == 0u) atomicAdd(&tally.checksum, sum);
    // Where counts and lengths are wrong, nobody knows where payloads are.
    bool is_located = !job.sections || atomicMin(&tally.problem, NOTHING_FOUND) >= OF_PAYLOAD;
    if (is_located && number < job.place_count) {
        const Place place = job.places[number];
        const Tensor& t = job.tensors[place.tensor];
        u32 chunk = place.chunk + thread;
        u32 problem = chunk < t.chunks ? problem_of(job.words, t, section_of(job, t, sender), chunk) : 0u;
        if (problem) atomicMin(&tally.problem, OF_PAYLOAD | ((u64)t.number << 8) | problem);
    }
    __syncthreads();
    if (thread < 32u && is_last(job, thread)) leave_verdict(job, thread);
}
