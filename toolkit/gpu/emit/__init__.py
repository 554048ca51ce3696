"""Operations -> work for kernels: an emitter for each family, and what they share."""
