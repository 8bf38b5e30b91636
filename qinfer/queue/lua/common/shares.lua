-- The shares of a lane. One tenant has the lane itself, share 0; each other one a stream `<lane>~<number>`.
--   <lane>~         hash: number → '<weight> <tenants>', sums of a share's tenants; only while the lane is divided
--   <lane>~tenants  hash: tenant → '<number> <weight>'
--   <lane>~seen     sorted set: tenant → when it asked last, in ms
--   <lane>~leads    hash: number → see fair.lua
local MOST_SHARES = 16
local MAY_FORGET_MS = 60000 -- gateways ask again after half of that

local function stream_of(lane, number) return number == 0 and lane or lane .. '~' .. number end

-- Returns a divided lane's shares as {number, weight, tenants}, itself first; else nil.
local function shares_of(lane)
  local found = redis.call('HGETALL', lane .. '~')
  if #found == 0 then return nil end
  local shares = {}
  for i = 1, #found, 2 do
    local weight, tenants = string.match(found[i + 1], '^(%d+) (%d+)$')
    shares[#shares + 1] = {tonumber(found[i]), tonumber(weight), tonumber(tenants)}
  end
  table.sort(shares, function(one, other) return one[1] < other[1] end)
  return shares
end

-- Returns a lane's streams as {number, stream, weight}, always including itself.
local function streams_of(lane)
  local streams = {}
  for _, share in ipairs(shares_of(lane) or {{0, 1, 0}}) do
    local stream = stream_of(lane, share[1])
    if share[1] == 0 or redis.call('EXISTS', stream) == 1 then
      streams[#streams + 1] = {share[1], stream, math.max(share[2], 1)}
    end
  end
  return streams
end
