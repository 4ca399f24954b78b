"""python -m fastsync.plan"""

from fastsync.planner.command import main

raise SystemExit(main())
