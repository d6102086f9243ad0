// exp, sigmoid and silu for whole vectors, in terms of the primitives.
// exp: x = n ln2 + r with |r| <= ln2 / 2, e^r by its series to the sixth power; relative error
// below 3e-7.
static inline qf qf_exp(qf x) {
    x = qf_min(qf_max(x, qf_set1(-87.0f)), qf_set1(88.0f));
    qf n = qf_round(qf_mul(x, qf_set1(1.44269504089f)));
    qf r = qf_fnma(n, qf_set1(0.693359375f), x);
    r = qf_fma(n, qf_set1(2.12194440e-4f), r);
    qf p = qf_set1(1.0f / 720);
    p = qf_fma(p, r, qf_set1(1.0f / 120));
    p = qf_fma(p, r, qf_set1(1.0f / 24));
    p = qf_fma(p, r, qf_set1(1.0f / 6));
    p = qf_fma(p, r, qf_set1(0.5f));
    p = qf_fma(p, r, qf_set1(1.0f));
    p = qf_fma(p, r, qf_set1(1.0f));
    return qf_mul(p, qf_pow2i(n));
}
static inline qf qf_sigmoid(qf x) {
    return qf_div(qf_set1(1.0f), qf_add(qf_set1(1.0f), qf_exp(qf_sub(qf_zero(), x))));
}
static inline qf qf_silu(qf x) { return qf_mul(x, qf_sigmoid(x)); }
