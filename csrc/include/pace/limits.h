// The physical limits of this machine, measured with the threads of the pool, for comparison with measured speeds.
#pragma once

#include <cstddef>

namespace pace {

// Bytes a second that all threads together read from a buffer of `buffer_bytes` (choose several times the last-level
// cache). Returns the best of repeated passes within about `seconds`.
double read_bandwidth(size_t buffer_bytes, double seconds);

// fp32 floating point operations a second of multiply-adds on registers (2 per lane), with the instruction set in use.
double fma_peak(double seconds);

}  // namespace pace
