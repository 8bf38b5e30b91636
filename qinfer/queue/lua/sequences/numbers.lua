-- Chooses the correlation ids that a model sees: those of tenants other than the first are replaced, numbers by
-- allotted numbers, so that no two sequences share one. Needs record.lua. Allotted numbers are in the upper half below
-- 2^53 (2^31 for 32 bits): exact as doubles, and hardly ever the first tenant's, which reserves one or gets another.
--   sequence-numbers       hash: `first` → the first tenant, `last` → how many numbers were allotted
--   sequence-number:<n>    string: the number's sequence; lives as long as its record

-- A damaged hash starts again.
local function on_numbers(command, ...)
  local key = prefix .. 'sequence-numbers'
  local reply = redis.pcall(command, key, ...)
  if type(reply) ~= 'table' then return reply end
  redis.call('UNLINK', key)
  return redis.call(command, key, ...)
end

-- Callers without a key are no tenant.
local function is_other(tenant)
  if tenant == '' then return false end
  local first = on_numbers('HGET', 'first')
  if not first then on_numbers('HSET', 'first', tenant) end
  return first and first ~= tenant
end

-- The low bits of a number's digits, exact below 2^53.
local function low_bits(digits, bits)
  if bits == 64 then return tonumber(digits) end
  local value = 0
  for digit in string.gmatch(digits, '%d') do value = (value * 10 + tonumber(digit)) % 2 ^ 32 end
  return value
end

-- Chooses and reserves for `ms` the id of a sequence with the number `held` (0 = none) for a model with ids of `bits`
-- (0 = text). Returns whether the tenant is not the first, and the number.
local function tell_apart(name, held, bits, ms)
  local other, digits = is_other(tenant_of(name)), string.match(name, '^[^:]+:n(%d+)$')
  if bits == 0 or not digits then return other, 0 end
  local limit = 2 ^ (bits == 32 and 31 or 53)

  local function reserve(number)
    if number <= limit / 2 or number >= limit or number % 1 ~= 0 then return false end
    local had = redis.pcall('GET', number_key(number))
    if had and had ~= name then return false end
    redis.call('SET', number_key(number), name, 'PX', ms)
    return true
  end

  if reserve(held) then return other, held end
  local own = low_bits(digits, bits)
  if not other and (own <= limit / 2 or own >= limit) then return other, 0 end
  if not other and reserve(own) then return other, own end
  local number
  repeat
    number = limit - 1 - on_numbers('HINCRBY', 'last', 1) % (limit / 2 - 1)
  until reserve(number)
  return other, number
end
