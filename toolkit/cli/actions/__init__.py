"""What the subcommands do with onnx, numpy and the compiler.

A command imports its action when it runs, so that `--help` and usage errors load none of these.
"""
