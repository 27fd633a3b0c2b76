// exp, expm1, tanh and erf of vectors. The same arithmetic on every instruction set; only fma() differs (generic rounds
// twice).
// NUMERICS
//   Coefficients are minimax fits (Lawson-weighted least squares on Chebyshev nodes, in 40 digits). The largest error
//   of the polynomial in exact arithmetic is noted at each. Measured over dense sweeps by tests/csrc/test_vec.cpp:
//   exp 2 ulp, expm1 3 ulp, tanh 4 ulp, erf 4 ulp, with FMA or without. NaN stays NaN.

// x in -90 .. 89 as n ln2 + r, |r| <= ln2 / 2.
//   e^r - 1 = r + r^2 P(r)                                                                         (P: 3e-9 relative)
struct Exponent {
    I32 n;
    F32 less_one;  // e^r - 1
};

PACE_INLINE Exponent split_exponent(F32 x) {
    const I32 n = to_int(x * broadcast(1.44269504f));
    const F32 nf = to_f32(n);
    // ln2 in two parts; the first has 9 significant bits, so that n * part is exact.
    const F32 r = fma(nf, broadcast(2.12194440e-4f), fma(nf, broadcast(-0.693359375f), x));
    F32 p = broadcast(1.395048916e-3f);
    p = fma(p, r, broadcast(8.368889558e-3f));
    p = fma(p, r, broadcast(4.166620583e-2f));
    p = fma(p, r, broadcast(1.666651884e-1f));
    p = fma(p, r, broadcast(5.000000095e-1f));
    return {n, fma(p, r * r, r)};
}

// e^x. Infinity above 88.722839; zero below -86.9, where the result would be close to subnormal.
PACE_INLINE F32 exp(F32 x) {
    const Exponent e = split_exponent(min(broadcast(89.0f), max(broadcast(-90.0f), x)));
    const F32 fraction = e.less_one + broadcast(1.0f);
    // 2^n as 2 * 2^(n-1): n reaches 128 just below the overflow.
    const F32 scaled = (fraction + fraction) * power_of_two(e.n - broadcast_int(1));
    const F32 finite = select(less(x, broadcast(-86.9f)), zero(), scaled);
    const F32 result = select(less(broadcast(88.722839f), x), broadcast(__builtin_inff()), finite);
    return select(is_nan(x), x, result);
}

// e^x - 1 for x <= 0, as 2^n (e^r - 1) + (2^n - 1). From -30 on down the result is -1.
PACE_INLINE F32 expm1_below_zero(F32 x) {
    const Exponent e = split_exponent(max(broadcast(-30.0f), x));
    const F32 power = power_of_two(e.n);
    return select(is_nan(x), x, fma(power, e.less_one, power - broadcast(1.0f)));
}

// 1 / (1 + e^-x).
PACE_INLINE F32 sigmoid(F32 x) { return broadcast(1.0f) / (broadcast(1.0f) + exp(negate(x))); }

// log(1 + e^x) = max(x, 0) + log(1 + u), u = e^-|x|. log(1 + u) = 2 atanh(z), z = u / (2 + u) <= 1 / 3, by an odd
// polynomial (4.5e-9 relative).
PACE_INLINE F32 softplus(F32 x) {
    const F32 u = exp(negate(abs(x))), z = u / (broadcast(2.0f) + u), z2 = z * z;
    F32 p = broadcast(1.400599368e-1f);
    p = fma(p, z2, broadcast(1.400090257e-1f));
    p = fma(p, z2, broadcast(2.001076362e-1f));
    p = fma(p, z2, broadcast(3.333320814e-1f));
    const F32 half = fma(p, z2 * z, z);
    return max(zero(), x) + (half + half);  // NaN stays NaN: max then returns its second operand
}

// tanh x: an odd polynomial below 0.625 (4e-9 relative), 1 - 2 / (e^2x + 1) above.
PACE_INLINE F32 tanh(F32 x) {
    const F32 a = abs(x), u = x * x;
    F32 p = broadcast(-5.717036599e-3f);
    p = fma(p, u, broadcast(2.065057904e-2f));
    p = fma(p, u, broadcast(-5.374349527e-2f));
    p = fma(p, u, broadcast(1.333149125e-1f));
    p = fma(p, u, broadcast(-3.333328392e-1f));
    const F32 small = fma(p, u * a, a);
    const F32 large = broadcast(1.0f) - broadcast(2.0f) / (exp(a + a) + broadcast(1.0f));
    return copy_sign(select(less(a, broadcast(0.625f)), small, large), x);
}

// erf x: an odd polynomial below 1 (1e-9), and 1 - e^Q(x) above. Q is a fit of log(erfc) on [1, 4] (1e-9 of erf). From
// 4 on the result is 1, because erfc < 2^-25.
PACE_INLINE F32 erf(F32 x) {
    const F32 a = abs(x), u = x * x;
    F32 p = broadcast(7.889116027e-5f);
    p = fma(p, u, broadcast(-8.020840143e-4f));
    p = fma(p, u, broadcast(5.189535198e-3f));
    p = fma(p, u, broadcast(-2.685444451e-2f));
    p = fma(p, u, broadcast(1.128360017e-1f));
    p = fma(p, u, broadcast(-3.761262714e-1f));
    p = fma(p, u, broadcast(1.128379166f));
    const F32 small = p * a;

    const F32 t = min(broadcast(4.0f), a);
    F32 q = broadcast(1.855748931e-4f);
    q = fma(q, t, broadcast(-2.939615734e-3f));
    q = fma(q, t, broadcast(2.180535115e-2f));
    q = fma(q, t, broadcast(-1.030374355e-1f));
    q = fma(q, t, broadcast(-6.382256024e-1f));
    q = fma(q, t, broadcast(-1.127040080f));
    q = fma(q, t, broadcast(-3.537089309e-4f));
    const F32 large = broadcast(1.0f) - exp(q);
    const F32 result = copy_sign(select(less(a, broadcast(1.0f)), small, large), x);
    return select(is_nan(x), x, result);
}
