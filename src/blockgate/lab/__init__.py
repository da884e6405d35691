"""The laboratory: data, models, baselines, training, benchmarks, experiments. The library needs none of it."""
