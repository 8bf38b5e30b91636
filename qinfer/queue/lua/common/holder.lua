-- Holders of entries, and executing entries. The latter are a set beside a lane with a limit; all others wait. A script
-- that takes an entry from its holder also removes it from the set.
local EXECUTING = '~executing'

-- Tells whether a consumer is a pseudo-owner, of released entries or of suspects.
local function is_ownerless(consumer) return consumer == 'released' or consumer == 'suspects' end

-- Returns {id, consumer, idle ms, deliveries} of an entry if the worker owns it, else nil.
local function held(lane, group, worker, id)
  local pending = redis.pcall('XPENDING', lane, group, id, id, 1)[1] -- fails without a group
  if pending and pending[2] == worker then return pending end
end

-- Removes entries from the executing set.
local function ended(lane, ...)
  if redis.call('EXISTS', lane .. EXECUTING) == 1 then redis.call('SREM', lane .. EXECUTING, ...) end
end
