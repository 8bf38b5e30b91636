-- The idle time from which a released entry is ready. It is released with an idle time of a day, or, to rest, of that
-- much less than this. The value exceeds any lease, and the clock differences between a primary and its replicas.
local READY_MS = 3600000
