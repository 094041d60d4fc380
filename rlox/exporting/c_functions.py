"""C functions from which an exported policy is made; a file contains those that it calls.

The layout of weights lets a compiler that may not reorder sums use vector instructions: a tile of TILE outputs, then of
SMALL ones, each with its weights input after input.
"""

from __future__ import annotations

TILE, SMALL = 32, 8

# Name, what it needs, and text. A function is written after those that it needs.
FUNCTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "linear": (
        (),
        """\
/* y = W x + b. The weights are stored in tiles of 32 outputs, then of 8, input after input, filled up with zeros. */
static void linear(float *y, const float *x, const float *w, const float *b, int n_in, int n_out)
{
    int o = 0, i, j;
    for (; o + 32 <= n_out; o += 32) {
        float sum[32];
        for (j = 0; j < 32; j++) sum[j] = b[o + j];
        for (i = 0; i < n_in; i++, w += 32)
            for (j = 0; j < 32; j++) sum[j] += x[i] * w[j];
        for (j = 0; j < 32; j++) y[o + j] = sum[j];
    }
    for (; o < n_out; o += 8) {
        float sum[8] = {0};
        for (i = 0; i < n_in; i++, w += 8)
            for (j = 0; j < 8; j++) sum[j] += x[i] * w[j];
        for (j = 0; j < 8 && o + j < n_out; j++) y[o + j] = sum[j] + b[o + j];
    }
}
""",
    ),
    "conv": (
        (),
        """\
/* A convolution over an image, channel after channel. Weights: input channel, row, column, output channel. */
static void conv(float *y, const float *x, const float *w, const float *b, int n_in, int height, int width, int n_out,
                 int out_height, int out_width, int rows, int columns, int down, int right, int top, int left)
{
    int oy, ox, c, ky, kx, o;
    for (oy = 0; oy < out_height; oy++)
        for (ox = 0; ox < out_width; ox++) {
            float sum[CONV_CHANNELS];
            for (o = 0; o < n_out; o++) sum[o] = b[o];
            for (c = 0; c < n_in; c++)
                for (ky = 0; ky < rows; ky++) {
                    const int iy = oy * down + ky - top;
                    if (iy < 0 || iy >= height) continue;
                    for (kx = 0; kx < columns; kx++) {
                        const int ix = ox * right + kx - left;
                        const float *row = w + ((c * rows + ky) * columns + kx) * n_out;
                        float pixel;
                        if (ix < 0 || ix >= width) continue;
                        pixel = x[(c * height + iy) * width + ix];
                        for (o = 0; o < n_out; o++) sum[o] += pixel * row[o];
                    }
                }
            for (o = 0; o < n_out; o++) y[(o * out_height + oy) * out_width + ox] = sum[o];
        }
}
""",
    ),
    "tanh_one": (
        (),
        """\
/* tanh by a rational function, accurate to 5e-7. Without branches, so that loops of it use vector instructions. */
static float tanh_one(float x)
{
    const float top = 7.90531110763549805f;
    const float y = x > top ? top : x < -top ? -top : x, z = y * y;
    float p = z * -2.76076847742355e-16f + 2.00018790482477e-13f;
    float q = z * 1.19825839466702e-06f + 1.18534705686654e-04f;
    p = z * p + -8.60467152213735e-11f;
    p = z * p + 5.12229709037114e-08f;
    p = z * p + 1.48572235717979e-05f;
    p = z * p + 6.37261928875436e-04f;
    p = z * p + 4.89352455891786e-03f;
    q = z * q + 2.26843463243900e-03f;
    q = z * q + 4.89352518554385e-03f;
    p = y * p / q;
    return x > 8.3f ? 1.0f : x < -8.3f ? -1.0f : p;
}
""",
    ),
    "apply_tanh": (
        ("tanh_one",),
        """\
static void apply_tanh(float *y, const float *x, int n)
{
    int i;
    for (i = 0; i < n; i++) y[i] = tanh_one(x[i]);
}
""",
    ),
    "apply_relu": (
        (),
        """\
static void apply_relu(float *y, const float *x, int n)
{
    int i;
    for (i = 0; i < n; i++) y[i] = x[i] > 0.0f ? x[i] : 0.0f;
}
""",
    ),
    "apply_sigmoid": (
        ("tanh_one",),
        """\
static void apply_sigmoid(float *y, const float *x, int n)
{
    int i;
    for (i = 0; i < n; i++) y[i] = 0.5f + 0.5f * tanh_one(0.5f * x[i]);
}
""",
    ),
    "apply_silu": (
        ("tanh_one",),
        """\
static void apply_silu(float *y, const float *x, int n)
{
    int i;
    for (i = 0; i < n; i++) y[i] = x[i] * (0.5f + 0.5f * tanh_one(0.5f * x[i]));
}
""",
    ),
    "apply_abs": (
        (),
        """\
static void apply_abs(float *y, const float *x, int n)
{
    int i;
    for (i = 0; i < n; i++) y[i] = x[i] < 0.0f ? -x[i] : x[i];
}
""",
    ),
    "apply_symlog": (
        (),
        """\
/* sign(x) log(1 + |x|) */
static void apply_symlog(float *y, const float *x, int n)
{
    int i;
    for (i = 0; i < n; i++) y[i] = x[i] < 0.0f ? -log1pf(-x[i]) : log1pf(x[i]);
}
""",
    ),
    "clip": (
        (),
        """\
/* Numbers between bounds; a step of 0 takes the same bound for all. */
static void clip(float *y, const float *x, const float *low, int low_step, const float *high, int high_step, int n)
{
    int i;
    for (i = 0; i < n; i++) {
        const float a = low[i * low_step], b = high[i * high_step], v = x[i] > a ? x[i] : a;
        y[i] = v < b ? v : b;
    }
}
""",
    ),
    "rms_norm": (
        (),
        """\
/* x / sqrt(mean(x * x) + eps) * scale over n numbers, for each of `size` places of an image; 1 for a vector. */
static void rms_norm(float *y, const float *x, const float *scale, float eps, int n, int size)
{
    int i, k;
    for (k = 0; k < size; k++) {
        float sum = 0.0f;
        for (i = 0; i < n; i++) sum += x[i * size + k] * x[i * size + k];
        sum = 1.0f / sqrtf(sum / (float)n + eps);
        for (i = 0; i < n; i++) y[i * size + k] = x[i * size + k] * sum * scale[i];
    }
}
""",
    ),
    "layer_norm": (
        (),
        """\
static void layer_norm(float *y, const float *x, const float *scale, const float *bias, float eps, int n)
{
    float sum = 0.0f, square = 0.0f;
    int i;
    for (i = 0; i < n; i++) sum += x[i];
    sum /= (float)n;
    for (i = 0; i < n; i++) square += (x[i] - sum) * (x[i] - sum);
    square = 1.0f / sqrtf(square / (float)n + eps);
    for (i = 0; i < n; i++) y[i] = (x[i] - sum) * square * scale[i] + bias[i];
}
""",
    ),
    "affine": (
        (),
        """\
/* x * scale + shift, rounded once: a product of two floats is exact as a double. */
static void affine(float *y, const float *x, const float *scale, const float *shift, int n)
{
    int i;
    for (i = 0; i < n; i++) y[i] = (float)((double)x[i] * scale[i] + shift[i]);
}
""",
    ),
    "expectation": (
        (),
        """\
/* The means of n numbers under the softmax of n logits each. */
static void expectation(float *y, const float *x, const float *numbers, int k, int n)
{
    int i, j;
    for (i = 0; i < k; i++, x += n) {
        float top = x[0], sum = 0.0f, mean_of = 0.0f;
        for (j = 1; j < n; j++) top = x[j] > top ? x[j] : top;
        for (j = 0; j < n; j++) {
            const float chance = expf(x[j] - top);
            sum += chance;
            mean_of += chance * numbers[j];
        }
        y[i] = mean_of / sum;
    }
}
""",
    ),
    "mean": (
        (),
        """\
static float mean(const float *x, int n)
{
    float sum = 0.0f;
    int i;
    for (i = 0; i < n; i++) sum += x[i];
    return sum / (float)n;
}
""",
    ),
    "argmax": (
        (),
        """\
static int argmax(const float *x, int n)
{
    int i, best = 0;
    for (i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}
""",
    ),
    "one_hot": (
        (),
        """\
/* n flags for each of k classes, counted from 1; none is set for 0. */
static void one_hot(float *y, const float *x, int k, int n)
{
    int i, j;
    for (i = 0; i < k; i++)
        for (j = 0; j < n; j++) y[i * n + j] = (int)x[i] == j + 1 ? 1.0f : 0.0f;
}
""",
    ),
    "draw": (
        (),
        """\
/* Draw k classes, counted from 1, from softmax(x) of n numbers each, mixed with the share `mix` of equal chances. */
static void draw(float *y, const float *x, const float *uniform, float mix, int k, int n)
{
    int i, j;
    for (i = 0; i < k; i++, x += n) {
        float top = x[0], sum = 0.0f, before = 0.0f;
        int drawn = 1;
        for (j = 1; j < n; j++) top = x[j] > top ? x[j] : top;
        for (j = 0; j < n; j++) sum += expf(x[j] - top);
        for (j = 0; j < n - 1; j++) {
            before += (1.0f - mix) * expf(x[j] - top) / sum + mix / (float)n;
            drawn += before < uniform[i];
        }
        y[i] = (float)drawn;
    }
}
""",
    ),
    "all_finite": (
        (),
        """\
static int all_finite(const float *x, int n)
{
    float sum = 0.0f;
    int i;
    for (i = 0; i < n; i++) sum += x[i] - x[i]; /* 0, or not a number */
    return sum == 0.0f;
}
""",
    ),
}
NEED_MATH = (
    "apply_symlog",
    "draw",
    "expectation",
    "layer_norm",
    "rms_norm",
)  # functions that call the mathematical library


def with_needs(names: set[str]) -> list[str]:
    """Return the functions that `names` need, in the order in which they are written."""
    needed = set(names)
    for name in names:
        needed |= set(FUNCTIONS[name][0])
    return [name for name in FUNCTIONS if name in needed]
