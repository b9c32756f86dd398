{{/* The pod template of a Ray node: call with (dict "root" . "role" ROLE "name" NAME "group" VALUES). */}}
{{- define "pilotfish.pod" -}}
{{- $root := .root -}}
{{- $isHead := eq .role "head" -}}
metadata:
  labels:
    {{- /* No version: a new version of the chart alone must not replace the pods. */}}
    {{- include "pilotfish.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
    pilotfish-group: {{ .name }}
    {{- with .group.resource }}
    pilotfish-resource: {{ . }}
    {{- end }}
    {{- with merge (deepCopy .group.labels) $root.Values.pods.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with merge (deepCopy .group.annotations) $root.Values.pods.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "pilotfish.serviceAccountName" $root }}
  # Only Ray's autoscaler, a container of the head, calls the API server.
  automountServiceAccountToken: {{ and $isHead $root.Values.autoscaling.enabled }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "pilotfish.graceSeconds" $root }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ $root.Values.pods.userId | int64 }}
    runAsGroup: {{ $root.Values.pods.userId | int64 }}
    fsGroup: {{ $root.Values.pods.userId | int64 }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.topologySpread }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: {{ $.group.topologyKey }}
      whenUnsatisfiable: {{ . }}
      labelSelector:
        matchLabels:
          {{- include "pilotfish.selector" $root | nindent 10 }}
          pilotfish-group: {{ $.name }}
  {{- end }}
  {{- with .group.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .group.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .group.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray
      image: {{ include "pilotfish.image" (list $root .group.image) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext:
        {{- include "pilotfish.containerSecurity" $root | nindent 8 }}
      ports:
        {{- if $isHead }}
        - {name: gcs, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        {{- end }}
        - {name: metrics, containerPort: 8080}
        - {name: http, containerPort: 8000}
        {{- if eq .role "ingress" }}
        {{- range (include "pilotfish.models" $root | fromYaml).models }}
        {{- if eq .ingress $.group.resource }}
        - {name: {{ .port }}, containerPort: {{ .arguments.server.grpc_port | int }}}
        {{- end }}
        {{- end }}
        {{- end }}
      resources:
        {{- range tuple "requests" "limits" }}
        {{ . }}:
          cpu: {{ $.group.cpu | quote }}
          memory: {{ $.group.memory }}
          {{- if $.group.gpus }}
          {{ $.group.gpuResource }}: {{ $.group.gpus | int | quote }}
          {{- end }}
        {{- end }}
      env:
        {{- include "pilotfish.variables" (list $root $isHead .group) | nindent 8 }}
      {{- with $root.Values.pods.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- include "pilotfish.probes" . | nindent 6 }}
      {{- if not $isHead }}
      lifecycle:
        preStop:
          # Requests end before the processes do: endpoints drop the pod while its replicas go on.
          exec:
            command: [sleep, {{ include "pilotfish.drainSeconds" $root | quote }}]
      {{- end }}
      volumeMounts:
        - {name: shared-memory, mountPath: /dev/shm}
        - {name: temporary, mountPath: /tmp}
        - {name: cache, mountPath: /home/pilotfish/.cache}
        - {name: models, mountPath: /models}
        {{- if and (eq .role "ingress") $root.Values.apiKeys.existingSecret }}
        - {name: api-keys, mountPath: {{ include "pilotfish.apiKeysDirectory" $root }}, readOnly: true}
        {{- end }}
        {{- if $root.Values.tls.existingSecret }}
        - {name: tls, mountPath: {{ include "pilotfish.tlsDirectory" $root }}, readOnly: true}
        {{- end }}
        {{- with concat $root.Values.pods.volumeMounts .group.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with .group.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ .group.sharedMemory }}
    - name: temporary
      emptyDir: {}
    - name: cache
      emptyDir: {}
    - name: models
      {{- with $root.Values.models.cache }}
      {{- if eq .volume "shared" }}
      persistentVolumeClaim:
        claimName: {{ .existingClaim | default (printf "%s-models" (include "pilotfish.fullname" $root)) }}
      {{- else if eq .volume "ephemeral" }}
      ephemeral:
        volumeClaimTemplate:
          spec:
            {{- include "pilotfish.modelsClaim" (list . (list "ReadWriteOnce")) | nindent 12 }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ .size }}
      {{- end }}
      {{- end }}
    {{- if eq .role "ingress" }}
    {{- with $root.Values.apiKeys.existingSecret }}
    - name: api-keys
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- end }}
    {{- /* Serve has an HTTP proxy in every pod. */}}
    {{- with $root.Values.tls.existingSecret }}
    - name: tls
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- with concat $root.Values.pods.volumes .group.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The specification of a claim for models: call with (list CACHE ACCESS_MODES). */}}
{{- define "pilotfish.modelsClaim" -}}
accessModes:
  {{- toYaml (index . 1) | nindent 2 }}
{{- with (index . 0).storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ (index . 0).size }}
{{- end -}}

{{- define "pilotfish.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/*
The environment variables of a pod: call with (list ROOT IS-HEAD GROUP). Those of the group come before those of all pods, and these before
the chart's own: KubeRay's resource definition refuses a name that is there twice.
*/}}
{{- define "pilotfish.variables" -}}
{{- $root := index . 0 -}}
{{- $own := include "pilotfish.env" $root | fromYamlArray -}}
{{- $own = concat $own (include "pilotfish.memoryMonitor" (list $root (index . 1)) | fromYamlArray) -}}
{{- $given := concat $own $root.Values.pods.env (index . 2).env -}}
{{- $last := dict -}}
{{- range $index, $variable := $given -}}
{{- $_ := set $last $variable.name $index -}}
{{- end -}}
{{- $variables := list -}}
{{- range $index, $variable := $given -}}
{{- if eq $index (get $last $variable.name) -}}
{{- $variables = append $variables $variable -}}
{{- end -}}
{{- end -}}
{{- toYaml $variables -}}
{{- end -}}

{{- define "pilotfish.env" -}}
- {name: HOME, value: /home/pilotfish}
- {name: PILOTFISH_CACHE_DIR, value: /models/pilotfish}
{{- /* All pods may write to the volume of the models, so compiled code has a volume of the pod's own. */}}
- {name: PILOTFISH_CODE_DIR, value: /home/pilotfish/.cache/pilotfish}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /home/pilotfish/.cache/inductor}
- {name: TRITON_CACHE_DIR, value: /home/pilotfish/.cache/triton}
- {name: CUDA_CACHE_PATH, value: /home/pilotfish/.cache/nv}
- {name: HF_HOME, value: /models/huggingface}
{{- /* As `pilotfish serve` sets them (set_ray_environment in deploy/settings.py). */}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS, value: "1"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "1"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S, value: "5"}
- {name: RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S, value: "60"}
{{- /* Ray writes the addresses of replicas without the brackets of IPv6. */}}
{{- if not (contains ":" (include "pilotfish.server" . | fromYaml).grpc_host) }}
- {name: RAY_SERVE_PROXY_USE_GRPC, value: "1"}
{{- end }}
- {name: RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH, value: "-1"}
- {name: RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP, value: "0"}
- {name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, value: "0"}
- {name: RAY_SERVE_PROXY_GC_THRESHOLD, value: "10000"}
- {name: RAY_gcs_server_port_wait_time_s, value: "120"}
- {name: GRPC_EXPERIMENTS, value: "-event_engine_client,-event_engine_listener"}
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: "deploy.ray.proxy:middlewares"}
- {name: RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH, value: "deploy.ray.controller:started"}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "pilotfish.raySecret" . }}, key: auth_token}
- name: PILOTFISH_CLUSTER_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "pilotfish.clusterSecret" . }}, key: {{ .Values.secrets.cluster.key }}}
{{- with .Values.models.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ $.Values.models.huggingFace.key }}}
{{- end }}
{{- end -}}

{{/*
Ray's memory monitor of a pod: call with (list ROOT IS-HEAD). It kills the youngest processes of the pod while the used share of its memory is above
`cluster.memory_threshold`. The head has Serve's controller, which it must not kill.
*/}}
{{- define "pilotfish.memoryMonitor" -}}
{{- $root := index . 0 -}}
{{- $preset := get ($root.Files.Get "files/presets.yaml" | fromYaml) $root.Values.preset -}}
{{- $threshold := dig "cluster" "memory_threshold" $preset.memory_threshold $root.Values.settings | float64 -}}
{{- if or (index . 1) (ge $threshold 1.0) -}}
- {name: RAY_memory_monitor_refresh_ms, value: "0"}
{{- else -}}
- {name: RAY_memory_usage_threshold, value: {{ $threshold | quote }}}
- {name: RAY_memory_monitor_refresh_ms, value: "250"}
{{- end }}
{{- end -}}

{{/* Ray's node answers on port 52365, the ingress on 8000 under the path of the first model that runs in the pod. */}}
{{- define "pilotfish.probes" -}}
{{- $probes := .root.Values.probes -}}
{{- $node := dict "path" "/api/local_raylet_healthz" "port" 52365 -}}
{{- $ready := dict "httpGet" $node -}}
{{- if eq .role "ingress" -}}
{{- $tls := (include "pilotfish.server" .root | fromYaml).tls | default dict -}}
{{- range reverse (include "pilotfish.models" .root | fromYaml).models -}}
{{- if eq .ingress $.group.resource -}}
{{- $path := printf "%s/ready" (trimSuffix "/" .routePrefix) -}}
{{- $ready = dict "httpGet" (dict "path" $path "port" "http" "scheme" (ternary "HTTPS" "HTTP" (hasKey $tls "certificate"))) -}}
{{- end -}}
{{- end -}}
{{- if hasKey $tls "client_ca" -}}
{{- /* Probes present no certificate. */}}
{{- $ready = dict "tcpSocket" (dict "port" "http") -}}
{{- end -}}
{{- end -}}
startupProbe:
  httpGet: {{ toJson $node }}
  periodSeconds: {{ $probes.startup.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ $probes.startup.failureThreshold }}
livenessProbe:
  httpGet: {{ toJson $node }}
  periodSeconds: {{ $probes.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ $probes.failureThreshold }}
readinessProbe:
  {{- toYaml $ready | nindent 2 }}
  periodSeconds: {{ $probes.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: 2
{{- end -}}
