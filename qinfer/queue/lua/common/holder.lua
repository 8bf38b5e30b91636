-- A worker has two consumers in a lane: that of its name, and `<name>/executing`. Entries of a lane with a limit go to the second
-- when they begin to execute: those of the first wait, as those that nobody has fetched do.
local EXECUTING = '/executing'

-- Tells whether a consumer stands for nobody: it owns what was released, or is a suspect.
local function is_ownerless(consumer) return consumer == 'released' or consumer == 'suspects' end

local function is_executing(consumer) return string.sub(consumer, -#EXECUTING) == EXECUTING end

-- Returns how an entry is pending, {id, consumer, idle ms, deliveries}, if either consumer of a worker owns it; else nil.
local function held(lane, group, worker, id)
  local pending = redis.pcall('XPENDING', lane, group, id, id, 1)[1] -- an error where there is no group any more
  if pending and (pending[2] == worker or pending[2] == worker .. EXECUTING) then return pending end
end
