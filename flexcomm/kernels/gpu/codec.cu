// The GPU's kernels: one call of each does a whole bucket. A block finds in `places` which chunks of which tensor it
// works on. Every kernel takes its arguments by value, so a launch needs no copy of them to the device, and all can be
// called alike: by CuPy on a device, and by a few lines of C++ where there is none.

// Ten blocks of two warps fit the registers of a multiprocessor if each thread has 96; see [Note: the tile].
#define OF_CHUNKS __launch_bounds__(64, 10)

extern "C" __global__ void OF_CHUNKS encode(const Job job) {
    const Place place = job.places[blockIdx.x];
    const Tensor& t = job.tensors[place.tensor];
    const Operand at = job.operands[place.tensor];
    u32 sum;
    if (t.is_tiled) {
        sum = encode_tile(job, t, at, place);
        if (threadIdx.x >= 32u) return;  // the first warp has the whole sum
    } else {
        sum = encode_blocks(job, t, at, place.chunk);
        if (job.sections) return;
        if (threadIdx.x >= 32u) {
            sum = add_lanes(sum);
            if (threadIdx.x == 32u) atomicAdd(&job.tally->checksum, sum);
        }
        __syncthreads();
        if (threadIdx.x >= 32u) return;
    }
    if (!job.sections) close_buffer(job, sum, threadIdx.x);
}

extern "C" __global__ void OF_CHUNKS rollback(const Job job) {
    const Place place = job.places[blockIdx.x];
    const Operand at = job.operands[place.tensor];
    roll_back_blocks(job, job.tensors[place.tensor], at, place.chunk);
}

extern "C" __global__ void __launch_bounds__(64) verify(const Job job) { verify_block(job); }

template <int EPILOGUE>
__device__ void decode_block(const Job& job) {
    // Buffers that were found wrong are not decoded, also if nobody has read yet that they were.
    if (job.status && *job.status) return;
    const Place place = job.places[blockIdx.x];
    const Tensor& t = job.tensors[place.tensor];
    const Operand at = job.operands[place.tensor];
    if (t.is_tiled) {
        decode_tile<EPILOGUE>(job, t, at, place);
    } else {
        decode_blocks<EPILOGUE>(job, t, at, place.chunk);
    }
}

extern "C" __global__ void OF_CHUNKS decode_store(const Job job) { decode_block<STORE>(job); }

extern "C" __global__ void OF_CHUNKS decode_sign_step(const Job job) { decode_block<SIGN_STEP>(job); }

extern "C" __global__ void OF_CHUNKS decode_plain_step(const Job job) { decode_block<PLAIN_STEP>(job); }

// Of payloads whose number of entries depends on the data, before encode (`words` zero, and `seal` behind it) or verify.

extern "C" __global__ void OF_CHUNKS count_chunks(const Job job) { count_block(job); }

extern "C" __global__ void __launch_bounds__(64) raise_thresholds(const Job job) { raise_threshold(job); }

extern "C" __global__ void __launch_bounds__(64) place_entries(const Job job) { place_payloads(job); }

extern "C" __global__ void __launch_bounds__(64) seal(const Job job) { seal_block(job); }

extern "C" __global__ void __launch_bounds__(64) locate(const Job job) { locate_payloads(job); }
