-- Who holds an entry, and which execute. Those of a lane with a limit that do are a set beside the lane: all others wait, as those do
-- that nobody has fetched. Whoever takes an entry from its holder takes it out of the set, too, in the same script.
local EXECUTING = '~executing'

-- Tells whether a consumer stands for nobody: it owns what was released, or is a suspect.
local function is_ownerless(consumer) return consumer == 'released' or consumer == 'suspects' end

-- Returns how an entry is pending, {id, consumer, idle ms, deliveries}, if a worker owns it; else nil.
local function held(lane, group, worker, id)
  local pending = redis.pcall('XPENDING', lane, group, id, id, 1)[1] -- an error where there is no group any more
  if pending and pending[2] == worker then return pending end
end

-- Takes note that entries execute no longer.
local function ended(lane, ...)
  if redis.call('EXISTS', lane .. EXECUTING) == 1 then redis.call('SREM', lane .. EXECUTING, ...) end
end
