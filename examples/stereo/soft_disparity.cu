// disparity[n, y, x] = sum over d of d * exp(cost[n, d, y, x]) / sum over d of exp(cost[n, d, y, x])
//
// A thread makes one pixel; `pixels` are those of one picture, and DISPARITIES is a macro. The largest
// cost is taken off first, so that no exponential overflows.

extern "C" __global__ void __launch_bounds__(128)
soft_disparity(const float* __restrict__ cost, float* __restrict__ disparity, int batch, int pixels) {
    const int pixel = blockIdx.x * blockDim.x + threadIdx.x;
    if (pixel >= batch * pixels) return;
    const float* own = cost + pixel / pixels * (DISPARITIES * pixels) + pixel % pixels;

    float largest = own[0];
    for (int d = 1; d < DISPARITIES; ++d) largest = fmaxf(largest, own[d * pixels]);

    float total = 0.0f, weighted = 0.0f;
    for (int d = 0; d < DISPARITIES; ++d) {
        const float share = expf(own[d * pixels] - largest);
        total += share;
        weighted += share * d;
    }
    disparity[pixel] = weighted / total;
}
