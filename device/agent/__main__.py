"""`python -m device.agent` and `tandem-agent`."""

from device.start.isolation import drop_working_directory
from device.start.packages import claim

drop_working_directory()
claim()

from device.agent.command_line import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main())
