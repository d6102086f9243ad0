// The first n < QF elements of a vector, in terms of the primitives: the ends of rows that QF does
// not divide.
static inline qf qf_load_part(const float *p, int n) { // the other lanes are 0
    float t[QF] = {0};
    memcpy(t, p, (size_t)n * sizeof *p);
    return qf_load(t);
}
static inline void qf_store_part(float *p, qf a, int n) {
    float t[QF];
    qf_store(t, a);
    memcpy(p, t, (size_t)n * sizeof *p);
}
