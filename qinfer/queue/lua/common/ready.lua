-- Released entries with this idle time are ready. They are released with a day, or, to rest, with that much less than
-- this. It exceeds any lease, and clock differences between a primary and its replicas.
local READY_MS = 3600000
