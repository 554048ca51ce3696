"""Operations -> kernel launches: an emitter for each family, and what they share."""
