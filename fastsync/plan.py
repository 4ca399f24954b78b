"""python -m fastsync.plan"""

from fastsync.planner.command import main

if __name__ == "__main__":
    raise SystemExit(main())
