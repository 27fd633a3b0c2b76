// The only symbol of this instruction set that the rest of the program uses.
#define PACE_STRINGIFY_(name) #name
#define PACE_STRINGIFY(name) PACE_STRINGIFY_(name)

extern const KernelTable kernel_table;
constexpr KernelTable kernel_table = {
    .name = PACE_STRINGIFY(PACE_ISA_NAME),
    .level = PACE_ISA_LEVEL,
    .emulated = PACE_ISA_EMULATED,
    .lanes = kLanes,

    .bf16_layout = PACE_ISA_LEVEL <= 1   ? Layout::PanelBF16Split
                   : PACE_ISA_LEVEL <= 3 ? Layout::PanelBF16
                                         : Layout::PanelBF16Pair,
    .rounds_inputs = PACE_ISA_LEVEL >= 4,
    .tile_rows = PACE_ISA_LEVEL >= 5 ? 32 : kManyRows,
    .pack_panel = pack_panel,
    .unpack_row = unpack_row,
    .quantize_row = quantize_row,
#if PACE_ISA_LEVEL >= 5
    .linear = {linear<WeightF32>, linear_amx, linear<WeightF16>},
#else
    .linear = {linear<WeightF32>, linear<WeightBF16>, linear<WeightF16>},
#endif
    .quantize_input = quantize_input,
    .linear_quantized = linear_quantized,
    .linear_epilogue = linear_epilogue,
    .activation = activation,
    .softcap = softcap,
    .gate = gate,
    .round_to_bf16 = round_to_bf16,

    .read_floats = read_floats,
    .spin_fma = spin_fma,

    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .rotary = rotary,
    .causal_conv = causal_conv,
    .prepare_tokens = prepare_tokens,
    .sweep_tokens = sweep_tokens,
    .update_matrix = update_matrix,
    .attention = attention,
    .attention_partition = attention_partition,
    .attention_merge = attention_merge,
    .store_kv = store_kv,
    .argmax = argmax,
    .exp_sum = exp_sum,
    .softmax = softmax,
    .find_at_least = find_at_least,
    .apply_mask = apply_mask,
    .block_peaks = block_peaks,
    .weigh = weigh,
    .survey_piece = survey_piece,
    .sum_likely = sum_likely,
    .find_between = find_between,
    .sum_from = sum_from,
};
