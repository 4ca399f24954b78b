"""python -m fastsync.timeline"""

from fastsync.timeline.command import main

raise SystemExit(main())
