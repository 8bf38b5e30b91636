-- Holders of entries, and the set of executing entries, which a lane with a limit has; other entries wait. A script that
-- takes an entry from its holder also removes it from the set.
local EXECUTING = '~executing'

-- Released entries with this idle time are ready. They are released with a day, or, to rest, with that much less than
-- this. It exceeds any lease, and clock differences between a primary and its replicas.
local READY_MS = 3600000

-- Tells whether a consumer stands for released entries or suspects.
local function is_ownerless(consumer) return consumer == 'released' or consumer == 'suspects' end

-- Returns {id, consumer, idle ms, deliveries} of the worker's own entry, else nil.
local function held(lane, group, worker, id)
  local pending = redis.pcall('XPENDING', lane, group, id, id, 1)[1] -- may have no group
  if pending and pending[2] == worker then return pending end
end

local function ended(lane, ...)
  if redis.call('EXISTS', lane .. EXECUTING) == 1 then redis.call('SREM', lane .. EXECUTING, ...) end
end
