// disparity[n, y, x] = sum over d of d * exp(cost[n, d, y, x]) / sum over d of exp(cost[n, d, y, x])
//
// DISPARITIES, PIXELS (of one picture) and BATCH are macros. The largest cost is taken off first,
// so that no exponential overflows.

extern "C" __global__ void __launch_bounds__(128)
soft_disparity(const float* __restrict__ cost, float* __restrict__ disparity) {
    const int pixel = blockIdx.x * blockDim.x + threadIdx.x;
    if (pixel >= BATCH * PIXELS) return;
    const float* own = cost + pixel / PIXELS * (DISPARITIES * PIXELS) + pixel % PIXELS;

    float largest = own[0];
    for (int d = 1; d < DISPARITIES; ++d) largest = fmaxf(largest, own[d * PIXELS]);

    float total = 0.0f, weighted = 0.0f;
    for (int d = 0; d < DISPARITIES; ++d) {
        const float share = expf(own[d * PIXELS] - largest);
        total += share;
        weighted += share * d;
    }
    disparity[pixel] = weighted / total;
}
