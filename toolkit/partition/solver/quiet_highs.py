"""HiGHS without output. Loading it takes a while, so solving alone imports this."""

import highspy


class QuietHighs(highspy.Highs):
    """HiGHS without output: from 1.16 on its constructor prints before any option is set."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.setOptionValue("output_flag", False)

    def enableCallbacks(self) -> None:  # noqa: N802
        """Silence it first: the constructor calls this, and setting callbacks prints the banner."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]
