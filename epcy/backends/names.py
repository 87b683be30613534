"""The words for what records and headers hold as numbers."""

PAYLOADS = ("bfloat16", "float16", "float32", "fp8 pair")  # enum epcy_dtype
LAYOUTS = ("rank", "expert")  # enum epcy_layout
# Where a low-latency combine sums: at each rank first, or at the source alone.
REDUCTIONS = ("rank", "source")
