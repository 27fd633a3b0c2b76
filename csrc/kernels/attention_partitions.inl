// From tiles (attention.inl) to whole rows: the tiles of a partition in order, and the states of partitions merged in
// order.
//
// SHAPES      A state is kPartialOut + Dp floats: max, sum of 2^(score - max), and the unnormalised sum of values
//             (attention.h).
//
// DEFINITION  Merge of (m, s, o) and (m', s', o'), M = max(m, m'):
//
//               (M, s 2^(m - M) + s' 2^(m' - M), o 2^(m - M) + o' 2^(m' - M)).
//
//             out[d] = o[d] / s; heads with sinks first merge with (sink, 1, 0).
//
// NUMERICS    A partition is computed independently of the others, on any thread. Merging in order gives the same bits
//             as one pass over all partitions of a row.

static void pack_queries(const AttentionArgs& args, const QueryRows& rows, float* packed, float* latent) {
    const int64_t group = args.group(), key_dim = args.kv.key_dim;
    const float scale = args.softcap != 0.0f
                            ? args.scale
                            : args.scale * kLog2E;  // with softcap, scores are multiplied by log2 e only after tanh
    for (int pass = 0; pass < count_passes(rows.rows); ++pass, packed += kPackedRows * key_dim) {
        const int begin = pass_begin(rows.rows, pass), end = pass_begin(rows.rows, pass + 1);
        for (int row = begin; row < end; ++row) {
            const int64_t token = (rows.first_row + row) / group, head = (rows.first_row + row) % group;
            const float* q = rows.q + token * args.q_token_stride + head * args.q_head_stride;
            for (int64_t d = 0; d < key_dim; ++d) packed[d * kPackedRows + row - begin] = q[d] * scale;
        }
    }
    if (!args.latent_q) return;
    const int64_t value_dim = args.kv.value_dim, padded = args.kv.padded_dim();
    for (int row = 0; row < rows.rows; ++row, latent += padded) {
        const int64_t token = rows.first_token + (rows.first_row + row) / group;
        const float* q =
            args.latent_q + token * args.latent_token_stride + rows.head(group, row) * args.latent_head_stride;
        for (int64_t d = 0; d < value_dim; ++d) latent[d] = q[d] * scale;
    }
}

// Computes the rows over the positions [begin, end) of one partition, into s.max, s.sum and s.out.
static void attend_partition(const AttentionArgs& args, const QueryRows& rows, int64_t begin, int64_t end,
                             AttentionScratch& s) {
    const int64_t padded = args.kv.padded_dim();
    for (int row = 0; row < rows.rows; ++row) {
        s.max[row] = -__builtin_inff();
        s.sum[row] = 0.0f;
        for (int64_t d = 0; d < padded; d += kLanes) store(s.out + row * padded + d, zero());
    }
    for (int64_t tile = begin / kTilePositions * kTilePositions; tile < end; tile += kTilePositions) {
        int first = kTilePositions, last = 0;  // range of tile positions that any row sees
        s.tile = tile;
        for (int row = 0; row < rows.rows; ++row) {
            const int64_t to = s.newest[row] + 1 - tile, from = s.oldest[row] - tile;
            s.begin[row] = from < 0 ? 0 : from > kTilePositions ? kTilePositions : int(from);
            s.end[row] = to < 0 ? 0 : to > kTilePositions ? kTilePositions : int(to);
            if (s.begin[row] >= s.end[row]) continue;
            first = s.begin[row] < first ? s.begin[row] : first;
            last = s.end[row] > last ? s.end[row] : last;
        }
        if (first >= last) continue;
        const int first_block = first / kBlockPositions, last_block = (last - 1) / kBlockPositions;
        switch (args.kv.dtype) {
            case DType::F32:
                attend_tile<float>(args, rows, tile, first_block, last_block, s);
                break;
            case DType::BF16:
                attend_tile<BF16>(args, rows, tile, first_block, last_block, s);
                break;
            case DType::F16:
                attend_tile<F16>(args, rows, tile, first_block, last_block, s);
                break;
            case DType::I8:
                attend_tile<int8_t>(args, rows, tile, first_block, last_block, s);
                break;
        }
    }
}

// Merges `total` and `part`, two states of a row over neighbouring positions (see kPartialOut), into `total`. A state
// with sum 0 has seen no position.
static void merge_states(float* total, float part_max, float part_sum, const float* part_out, int64_t padded_dim) {
    if (part_sum == 0.0f) return;
    float* out = total + kPartialOut;
    if (total[1] == 0.0f) {
        total[0] = part_max;
        total[1] = part_sum;
        for (int64_t d = 0; d < padded_dim; d += kLanes) store(out + d, load(part_out + d));
        return;
    }
    const float new_max = part_max > total[0] ? part_max : total[0];
    const float keep = power_of_two_below_one(total[0] - new_max), add = power_of_two_below_one(part_max - new_max);
    total[0] = new_max;
    total[1] = total[1] * keep + part_sum * add;
    for (int64_t d = 0; d < padded_dim; d += kLanes) {
        store(out + d, fma(load(part_out + d), broadcast(add), load(out + d) * broadcast(keep)));
    }
}

static void write_row(const AttentionArgs& args, const QueryRows& rows, int row, const float* total) {
    const int64_t group = args.group(), value_dim = args.kv.value_dim;
    const int64_t token = rows.first_token + (rows.first_row + row) / group;
    const int64_t head = rows.head(group, row);
    float* out = args.out + (token * args.query_heads + head) * value_dim;
    float weight = 1.0f / total[1];
    if (args.sinks) {
        const float sink = args.sinks[head] * kLog2E, max = sink > total[0] ? sink : total[0];
        const float keep = power_of_two_below_one(total[0] - max);
        weight = keep / (total[1] * keep + power_of_two_below_one(sink - max));
    }
    const F32 scale = broadcast(weight);
    for (int64_t d = 0; d < value_dim; d += kLanes) {
        const int n = value_dim - d < kLanes ? int(value_dim - d) : kLanes;
        store_lanes(out + d, load_lanes(total + kPartialOut + d, n) * scale, n);
    }
}

// Computes all partitions that the rows see, merged in order, into args.out.
static void attention(const AttentionArgs& args, const QueryRows& rows, float* scratch) {
    AttentionScratch s = cut_scratch(args, rows, scratch);
    const int64_t padded = args.kv.padded_dim(), state_floats = partial_floats(args.kv);
    const int64_t begin = s.first, end = s.last + 1;
    pack_queries(args, rows, s.q, s.latent_q);
    for (int row = 0; row < rows.rows; ++row) s.total[row * state_floats + 1] = 0.0f;
    for (int64_t from = begin; from < end;) {
        const int64_t next = (from / kPartitionPositions + 1) * kPartitionPositions;
        attend_partition(args, rows, from, next < end ? next : end, s);
        for (int row = 0; row < rows.rows; ++row) {
            merge_states(s.total + row * state_floats, s.max[row], s.sum[row], s.out + row * padded, padded);
        }
        from = next;
    }
    for (int row = 0; row < rows.rows; ++row) write_row(args, rows, row, s.total + row * state_floats);
}

// Computes one partition into states [rows][partial_floats].
static void attention_partition(const AttentionArgs& args, const QueryRows& rows, int64_t partition, float* states,
                                float* scratch) {
    AttentionScratch s = cut_scratch(args, rows, scratch);
    const int64_t padded = args.kv.padded_dim(), state_floats = partial_floats(args.kv);
    const int64_t begin = partition * kPartitionPositions, next = begin + kPartitionPositions;
    const int64_t end = s.last + 1;
    pack_queries(args, rows, s.q, s.latent_q);
    attend_partition(args, rows, begin, next < end ? next : end, s);
    for (int row = 0; row < rows.rows; ++row, states += state_floats) {
        states[0] = s.max[row];
        states[1] = s.sum[row];
        for (int64_t d = 0; d < padded; d += kLanes) store(states + kPartialOut + d, load(s.out + row * padded + d));
    }
}

// Merges the states of `partitions` partitions, [partitions][rows][partial_floats] in order, into args.out.
static void attention_merge(const AttentionArgs& args, const QueryRows& rows, int64_t partitions, const float* states,
                            float* scratch) {
    const int64_t padded = args.kv.padded_dim(), state_floats = partial_floats(args.kv);
    for (int row = 0; row < rows.rows; ++row) {
        scratch[1] = 0.0f;
        for (int64_t p = 0; p < partitions; ++p) {
            const float* state = states + (p * rows.rows + row) * state_floats;
            merge_states(scratch, state[0], state[1], state + kPartialOut, padded);
        }
        write_row(args, rows, row, scratch);
    }
}
