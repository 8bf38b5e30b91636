-- Which share of a lane a tenant has; needs shares.lua, now_ms.lua and waiting.lua.

-- Changes the weight and the number of tenants of a share, of a lane that is divided.
local function change_share(lane, number, weight, tenants)
  local was = redis.call('HGET', lane .. '~', number) or '0 0'
  local its_weight, its_tenants = string.match(was, '^(%d+) (%d+)$')
  redis.call('HSET', lane .. '~', number, string.format('%d %d', its_weight + weight, its_tenants + tenants))
end

-- Returns the two streams of which a tenant uses the shorter one where there are more tenants than streams.
local function two_of(tenant)
  local digest = redis.sha1hex(tenant)
  local one = tonumber(string.sub(digest, 1, 6), 16) % MOST_SHARES
  local other = (one + 1 + tonumber(string.sub(digest, 7, 12), 16) % (MOST_SHARES - 1)) % MOST_SHARES
  return one, other
end

-- Returns a share for a tenant: one that nobody has, the lane itself first; else the shorter one of its two.
local function choose_share(lane, shares, tenant)
  local is_taken = {}
  for _, share in ipairs(shares) do is_taken[share[1]] = share[3] > 0 end
  for number = 0, MOST_SHARES - 1 do
    if not is_taken[number] then return number end
  end
  local one, other = two_of(tenant)
  return redis.call('XLEN', stream_of(lane, one)) <= redis.call('XLEN', stream_of(lane, other)) and one or other
end

-- Takes a tenant's place from it.
local function leave_share(lane, tenant, number, weight)
  redis.call('HDEL', lane .. '~tenants', tenant)
  if redis.call('EXISTS', lane .. '~') == 0 then return end
  change_share(lane, number, -weight, -1)
end

-- Gives a tenant a place in a share; its stream is made where there is none.
local function enter_share(lane, group, tenant, number, weight)
  redis.call('HSET', lane .. '~tenants', tenant, number .. ' ' .. weight)
  if number > 0 and redis.call('EXISTS', stream_of(lane, number)) == 0 then
    redis.call('XGROUP', 'CREATE', stream_of(lane, number), group, '0', 'MKSTREAM')
  end
  if redis.call('EXISTS', lane .. '~') == 1 then
    change_share(lane, number, weight, 1)
  elseif number > 0 then -- it is divided from now on: until now one tenant had it, or none
    local first, tenants = 0, 0
    for _, place in ipairs(redis.call('HVALS', lane .. '~tenants')) do
      local its_number, its_weight = string.match(place, '^(%d+) (%d+)$')
      if its_number == '0' then first, tenants = first + its_weight, tenants + 1 end
    end
    redis.call('HSET', lane .. '~', 0, string.format('%d %d', first, tenants), number, string.format('%d %d', weight, 1))
  end
end

-- Returns the share of a tenant, which it gets where it has none, whether others have it, too, and whether its stream is new.
-- `weight` is 0 where whoever asks does not know it.
local function place_of(lane, group, tenant, weight)
  redis.call('ZADD', lane .. '~seen', now_ms(), tenant)
  local shares, tenants = shares_of(lane), {}
  for _, share in ipairs(shares or {}) do tenants[share[1]] = share[3] end
  local known, number = redis.call('HGET', lane .. '~tenants', tenant), nil
  if known then
    local its_number, its_weight = string.match(known, '^(%d+) (%d+)$')
    number, its_weight = tonumber(its_number), tonumber(its_weight)
    weight = weight > 0 and weight or its_weight
    local is_alone = not shares or tenants[number] == 1
    local may_return = shares and number > 0 and tenants[0] == 0 -- to the lane itself, which is free
    local is_there = number == 0 or redis.call('EXISTS', stream_of(lane, number)) == 1
    if is_alone and is_there and weight == its_weight and not may_return then return number, false, false end
    leave_share(lane, tenant, number, its_weight)
    shares = shares_of(lane)
    if is_alone and not may_return then
      enter_share(lane, group, tenant, number, weight)
      return number, false, not is_there
    end
  end
  if not shares then -- one tenant has the lane itself, or none
    number = redis.call('HLEN', lane .. '~tenants') == 0 and 0 or 1
  else
    number = choose_share(lane, shares, tenant)
  end
  local is_new = number > 0 and redis.call('EXISTS', stream_of(lane, number)) == 0
  enter_share(lane, group, tenant, number, math.max(weight, 1))
  return number, (tenants[number] or 0) > 0 and shares ~= nil, is_new
end

-- Returns where the next entry of a tenant goes: {stream, number (of that), share (of the tenant), is_shared (others have it, too),
-- is_marked (the entry is to carry the field `d`)}. The first entry of a new stream goes to the lane itself if nothing unread is there: who
-- may sleep before that does not know of the new stream yet, and looks for it at the mark.
local function route_of(lane, group, tenant, weight)
  if tenant == '' then return {stream = lane, number = 0, share = 0} end
  local share, is_shared, is_new = place_of(lane, group, tenant, weight)
  local is_marked = is_new and unread(lane, group) <= 0
  local number = is_marked and 0 or share
  return {stream = stream_of(lane, number), number = number, share = share, is_shared = is_shared, is_marked = is_marked}
end

-- Forgets tenants that have not asked for their place for long, once their streams are empty, and the empty streams that nobody has.
local function forget_tenants(lane)
  local seen = lane .. '~seen'
  for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', seen, '-inf', now_ms() - MAY_FORGET_MS, 'LIMIT', 0, 100)) do
    local place = redis.call('HGET', lane .. '~tenants', tenant) or '0 0'
    local number, weight = string.match(place, '^(%d+) (%d+)$')
    local share = redis.call('HGET', lane .. '~', number)
    local is_alone = not share or tonumber(string.match(share, ' (%d+)$')) <= 1
    if not is_alone or redis.call('XLEN', stream_of(lane, tonumber(number))) == 0 then
      redis.call('ZREM', seen, tenant)
      leave_share(lane, tenant, number, tonumber(weight))
    end
  end
  local shares = shares_of(lane)
  for _, share in ipairs(shares or {}) do
    local number, stream = share[1], stream_of(lane, share[1])
    if number > 0 and share[3] == 0 and redis.call('XLEN', stream) == 0 then
      redis.call('DEL', stream)
      redis.call('HDEL', lane .. '~', number)
      redis.call('HDEL', lane .. '~leads', number)
    end
  end
  if shares and redis.call('HLEN', lane .. '~') == 1 then redis.call('DEL', lane .. '~', lane .. '~leads') end
end
