-- Marks entries that `worker` owns as executing, so that they no longer wait.
-- KEYS: lane. ARGV: group, worker, entry ids, mostly in order. Returns how many.
local lane, group, worker = KEYS[1], ARGV[1], ARGV[2]
local most = 100000 -- a worker holds far fewer

local owned = {}
local pending = redis.pcall('XPENDING', lane, group, ARGV[3], ARGV[#ARGV], most, worker)
if pending.err then return 0 end
for _, entry in ipairs(pending) do owned[entry[1]] = true end

local ids = {}
for i = 3, #ARGV do
  if owned[ARGV[i]] or held(lane, group, worker, ARGV[i]) then ids[#ids + 1] = ARGV[i] end
end
if #ids > 0 then redis.call('SADD', lane .. EXECUTING, unpack(ids)) end
return #ids
