// The one symbol of this instruction set that the rest of the program sees.
#define PACE_STRINGIFY_(name) #name
#define PACE_STRINGIFY(name) PACE_STRINGIFY_(name)

extern const KernelTable kernel_table;
constexpr KernelTable kernel_table = {
    .name = PACE_STRINGIFY(PACE_ISA_NAME),
    .level = PACE_ISA_LEVEL,
    .emulated = PACE_ISA_EMULATED,
    .lanes = kLanes,
};
