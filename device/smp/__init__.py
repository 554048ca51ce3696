"""The board's end of SMP (mcumgr): releases over a serial line or UDP, by stock clients."""
