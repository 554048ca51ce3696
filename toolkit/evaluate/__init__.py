"""How good an engine is.

infer       runs models and engines on inputs
agreement   any two of model, engine and saved outputs, compared
compare     what INT8 loses against FP32, and why
bench       speed
"""
