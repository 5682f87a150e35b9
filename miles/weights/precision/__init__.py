"""Quantizers: weights in the format the engine loads, bit for bit as it reads them (docs/precision.md).

    fp8_block.py  e4m3, one fp32 scale per 128x128 block
    mxfp8.py      e4m3, one power of two per 32 elements of a row
    nvfp4.py      e2m1, one e4m3 scale per 16 elements of a row and one fp32 scale for the tensor
    int4.py       integers, one bf16 scale per 32 elements of a row
    export.py     a stream of Hugging Face tensors in high precision -> the same, quantized

The table of formats and legal pairs is `miles.config.precision`. Each format has `quantize(weight) -> {suffix: tensor}` and `dequantize(parts, dtype)`;
where a scale's mantissa is short enough, a product of element and scale is exact in fp32, so nobody's order of operations matters.
"""
