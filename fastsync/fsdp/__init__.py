"""Parameters that ranks share and gather when a module needs them: ZeRO-3 by FSDP2's contract."""
