-- The tenants' shares of a lane; needs shares.lua, now_ms.lua and waiting.lua.

local function change_share(lane, number, weight, tenants)
  local was = redis.call('HGET', lane .. '~', number) or '0 0'
  local its_weight, its_tenants = string.match(was, '^(%d+) (%d+)$')
  redis.call('HSET', lane .. '~', number, string.format('%d %d', its_weight + weight, its_tenants + tenants))
end

-- A tenant's two streams, if there are more tenants than streams.
local function two_of(tenant)
  local digest = redis.sha1hex(tenant)
  local one = tonumber(string.sub(digest, 1, 6), 16) % MOST_SHARES
  local other = (one + 1 + tonumber(string.sub(digest, 7, 12), 16) % (MOST_SHARES - 1)) % MOST_SHARES
  return one, other
end

-- Returns a free share, the lane itself first, or else the shorter of a tenant's two.
local function choose_share(lane, shares, tenant)
  local is_taken = {}
  for _, share in ipairs(shares) do is_taken[share[1]] = share[3] > 0 end
  for number = 0, MOST_SHARES - 1 do
    if not is_taken[number] then return number end
  end
  local one, other = two_of(tenant)
  return redis.call('XLEN', stream_of(lane, one)) <= redis.call('XLEN', stream_of(lane, other)) and one or other
end

local function leave_share(lane, tenant, number, weight)
  redis.call('HDEL', lane .. '~tenants', tenant)
  if redis.call('EXISTS', lane .. '~') == 0 then return end
  change_share(lane, number, -weight, -1)
end

local function enter_share(lane, group, tenant, number, weight)
  redis.call('HSET', lane .. '~tenants', tenant, number .. ' ' .. weight)
  if number > 0 and redis.call('EXISTS', stream_of(lane, number)) == 0 then
    redis.call('XGROUP', 'CREATE', stream_of(lane, number), group, '0', 'MKSTREAM')
  end
  if redis.call('EXISTS', lane .. '~') == 1 then
    change_share(lane, number, weight, 1)
  elseif number > 0 then -- at most one tenant had the lane
    local first, tenants = 0, 0
    for _, place in ipairs(redis.call('HVALS', lane .. '~tenants')) do
      local its_number, its_weight = string.match(place, '^(%d+) (%d+)$')
      if its_number == '0' then first, tenants = first + its_weight, tenants + 1 end
    end
    redis.call('HSET', lane .. '~', 0, string.format('%d %d', first, tenants), number, string.format('%d %d', weight, 1))
  end
end

-- Returns a tenant's share, assigned if needed, whether others use it, and whether its stream is new. `weight` 0 =
--   unknown.
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
    local may_return = shares and number > 0 and tenants[0] == 0
    local is_there = number == 0 or redis.call('EXISTS', stream_of(lane, number)) == 1
    if is_alone and is_there and weight == its_weight and not may_return then return number, false, false end
    leave_share(lane, tenant, number, its_weight)
    shares = shares_of(lane)
    if is_alone and not may_return then
      enter_share(lane, group, tenant, number, weight)
      return number, false, not is_there
    end
  end
  if not shares then -- at most one tenant has the lane
    number = redis.call('HLEN', lane .. '~tenants') == 0 and 0 or 1
  else
    number = choose_share(lane, shares, tenant)
  end
  local is_new = number > 0 and redis.call('EXISTS', stream_of(lane, number)) == 0
  enter_share(lane, group, tenant, number, math.max(weight, 1))
  return number, (tenants[number] or 0) > 0 and shares ~= nil, is_new
end

-- Returns {stream, number (of the stream), share (the tenant's), is_shared (by others), is_marked (the entry needs the
--   field `d`)} for a tenant's next entry. A new stream's first entry goes to the lane itself if nothing unread is
--   there: the mark tells sleeping readers.
local function route_of(lane, group, tenant, weight)
  if tenant == '' then return {stream = lane, number = 0, share = 0} end
  local share, is_shared, is_new = place_of(lane, group, tenant, weight)
  local is_marked = is_new and unread(lane, group) <= 0
  local number = is_marked and 0 or share
  return {stream = stream_of(lane, number), number = number, share = share, is_shared = is_shared, is_marked = is_marked}
end

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

-- Adds the fields by which `move.lua` finds an entry: endpoint, tenant, id of a request with a record.
local function mark_origin(fields, endpoint, tenant, request)
  if endpoint == '' then return end
  for _, pair in ipairs({{'e', endpoint}, {'t', tenant}, {'r', request}}) do
    if pair[2] ~= '' then fields[#fields + 1], fields[#fields + 2] = pair[1], pair[2] end
  end
end
