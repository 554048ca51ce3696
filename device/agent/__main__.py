"""`python -m device.agent`: the same as `tandem-agent`."""

from device.agent.agent import main

if __name__ == "__main__":
    raise SystemExit(main())
