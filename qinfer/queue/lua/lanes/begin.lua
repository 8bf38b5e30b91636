-- Takes note that entries which `worker` owns begin to execute: they wait no longer.
-- KEYS: the lane. ARGV: group, worker, entry ids in their order. Returns how many began.
local lane, group, worker = KEYS[1], ARGV[1], ARGV[2]
local most = 100000 -- a worker holds far fewer

local owned = {}
local pending = redis.pcall('XPENDING', lane, group, ARGV[3], ARGV[#ARGV], most, worker) -- an error where there is no group any more
for _, entry in ipairs(not pending.err and pending or {}) do owned[entry[1]] = true end

local ids = {}
for i = 3, #ARGV do
  if owned[ARGV[i]] then ids[#ids + 1] = ARGV[i] end
end
if #ids > 0 then -- JUSTID: the delivery count stays
  local words = {lane, group, worker .. EXECUTING, 0, unpack(ids)}
  words[#words + 1] = 'JUSTID'
  redis.call('XCLAIM', unpack(words))
end
return #ids
