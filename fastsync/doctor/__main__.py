"""python -m fastsync.doctor"""

from fastsync.doctor.command import main

raise SystemExit(main())
